WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'available',
        attempt = 0,
        run_at = now(),
        claim_order = now() + (j.claim_order - j.run_at),
        finished_at = NULL,
        dead_letter_reason = NULL,
        cancel_reason = NULL
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid)
    WHERE j.id = i.id AND (j.state || '') IN ('cancelled', 'failed')
    RETURNING i.n, j.id, j.queue, j.state, j.attempt, j.lease_number, j.worker, j.claim_order
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'redrive', state, attempt, lease_number, NULL, NULL::jsonb FROM moved
), hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz, hinted.told
FROM moved LEFT JOIN hinted USING (queue)
