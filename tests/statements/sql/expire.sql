WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'cancelled',
        finished_at = now(),
        cancel_reason = 'expired'
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid)
    WHERE j.id = i.id AND (j.state || '') IN ('available', 'retryable', 'scheduled')
    RETURNING i.n, j.id, j.state, j.attempt, j.lease_number, j.worker, j.cancel_reason
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'expire', state, attempt, lease_number, worker, jsonb_strip_nulls(jsonb_build_object('reason', cancel_reason)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
