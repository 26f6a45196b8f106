WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'available',
        attempt = j.attempt - 1,
        settled_as = 'release',
        lease_expires_at = NULL,
        deadline_at = NULL
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, j.id, j.queue, j.state, j.attempt, j.lease_number, j.worker, j.claim_order
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'release', state, attempt + 1, lease_number, worker, NULL::jsonb FROM moved
), hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz, hinted.told
FROM moved LEFT JOIN hinted USING (queue)
