WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'failed',
        settled_as = 'fail',
        lease_expires_at = NULL,
        deadline_at = NULL,
        finished_at = now(),
        dead_letter_reason = CASE WHEN true AND (SELECT q.keep_dead_letters FROM towpath.queues AS q WHERE q.name = j.queue) IS NOT false THEN 'failed' END,
        errors_total = j.errors_total + 1,
        errors = CASE WHEN jsonb_array_length(j.errors) >= 20 THEN j.errors - 0 ELSE coalesce(j.errors, '[]') END || jsonb_build_array(i.error || jsonb_build_object('attempt', j.attempt, 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'worker', j.worker))
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, error jsonb)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, j.id, j.state, j.attempt, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'fail', state, attempt, lease_number, worker, NULL::jsonb FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
