WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = CASE WHEN j.attempt >= j.max_attempts THEN 'failed' ELSE 'retryable' END,
        settled_as = 'callback_time_out',
        lease_expires_at = NULL,
        deadline_at = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        finished_at = CASE WHEN j.attempt >= j.max_attempts THEN now() END,
        dead_letter_reason = CASE WHEN j.attempt >= j.max_attempts AND (SELECT q.keep_dead_letters FROM towpath.queues AS q WHERE q.name = j.queue) IS NOT false THEN 'callback_timeout' END,
        errors_total = j.errors_total + 1,
        errors = CASE WHEN jsonb_array_length(j.errors) >= 20 THEN j.errors - 0 ELSE coalesce(j.errors, '[]') END || jsonb_build_array(jsonb_build_object('kind', 'callback_timeout', 'message', 'Nobody called back before the deadline of the wait.', 'attempt', j.attempt, 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'worker', j.worker)),
        run_at = now() + coalesce(NULL, towpath.backoff_seconds(coalesce(j.backoff, (SELECT q.backoff FROM towpath.queues AS q WHERE q.name = j.queue)), j.attempt, j.id)) * interval '1 s',
        claim_order = now() + coalesce(NULL, towpath.backoff_seconds(coalesce(j.backoff, (SELECT q.backoff FROM towpath.queues AS q WHERE q.name = j.queue)), j.attempt, j.id)) * interval '1 s' + (j.claim_order - j.run_at)
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, wait_name text)
    WHERE j.id = i.id AND (j.state || '') IN ('waiting_external')
    RETURNING i.n, i.wait_name, j.id, j.state, j.attempt, j.run_at, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'callback_time_out', state, attempt, lease_number, worker, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, moved.run_at, CASE WHEN moved.state <> 'failed' THEN pg_notify('towpath', 'due')::text END
FROM moved
