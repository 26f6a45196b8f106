WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'available',
        attempt = 0,
        settled_as = 'callback_retry',
        lease_expires_at = NULL,
        deadline_at = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        run_at = now(),
        claim_order = now() + (j.claim_order - j.run_at),
        callback_results = NULL
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, wait_name text)
    WHERE j.id = i.id AND (j.state || '') IN ('waiting_external')
    RETURNING i.n, i.wait_name, j.id, j.queue, j.state, j.attempt, j.lease_number, j.worker, j.claim_order
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'callback_retry', state, attempt, lease_number, NULL, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
), hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz, hinted.told
FROM moved LEFT JOIN hinted USING (queue)
