WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'completed',
        settled_as = 'callback_complete',
        lease_expires_at = NULL,
        deadline_at = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        finished_at = now(),
        result = i.payload
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, payload jsonb, wait_name text)
    WHERE j.id = i.id AND (j.state || '') IN ('waiting_external')
    RETURNING i.n, i.wait_name, j.id, j.state, j.attempt, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'callback_complete', state, attempt, lease_number, NULL, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
