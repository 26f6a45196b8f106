WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'cancelled',
        settled_as = 'cancel',
        lease_expires_at = NULL,
        deadline_at = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        finished_at = now(),
        cancel_reason = i.reason
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, reason text)
    WHERE j.id = i.id AND (j.state || '') IN ('available', 'retryable', 'running', 'scheduled', 'waiting_external')
    RETURNING i.n, j.id, j.state, j.attempt, j.lease_number, j.worker, j.cancel_reason
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'cancel', state, attempt, lease_number, NULL, jsonb_strip_nulls(jsonb_build_object('reason', cancel_reason)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
