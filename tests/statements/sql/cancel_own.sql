WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'cancelled',
        settled_as = 'cancel_own',
        lease_expires_at = NULL,
        deadline_at = NULL,
        finished_at = now(),
        cancel_reason = i.reason
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, reason text)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, j.id, j.state, j.attempt, j.lease_number, j.worker, j.cancel_reason
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'cancel_own', state, attempt, lease_number, worker, jsonb_strip_nulls(jsonb_build_object('reason', cancel_reason)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
