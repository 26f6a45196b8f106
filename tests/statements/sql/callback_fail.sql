WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'failed',
        settled_as = 'callback_fail',
        lease_expires_at = NULL,
        deadline_at = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        finished_at = now(),
        dead_letter_reason = CASE WHEN true AND (SELECT q.keep_dead_letters FROM towpath.queues AS q WHERE q.name = j.queue) IS NOT false THEN 'callback_failed' END,
        errors_total = j.errors_total + 1,
        errors = CASE WHEN jsonb_array_length(j.errors) >= 20 THEN j.errors - 0 ELSE coalesce(j.errors, '[]') END || jsonb_build_array(i.error || jsonb_build_object('kind', 'callback_failed', 'attempt', j.attempt, 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'worker', j.worker))
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, error jsonb, wait_name text)
    WHERE j.id = i.id AND (j.state || '') IN ('waiting_external')
    RETURNING i.n, i.wait_name, j.id, j.state, j.attempt, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'callback_fail', state, attempt, lease_number, NULL, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
