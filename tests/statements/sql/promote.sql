WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'available'
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid)
    WHERE j.id = i.id AND (j.state || '') IN ('retryable', 'scheduled')
    RETURNING i.n, j.queue, j.state, j.attempt, j.claim_order
), hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz, hinted.told
FROM moved LEFT JOIN hinted USING (queue)
