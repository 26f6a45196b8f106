WITH picked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(items)s) AS given(n integer, id uuid, lease_number bigint, delay_seconds double precision, result jsonb, error jsonb, reason text, wait_ids uuid[], answers_needed smallint, attached boolean, payload jsonb, wait_name text)
), moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'cancelled',
        settled_as = 'cancel_own',
        lease_expires_at = NULL,
        deadline_at = NULL,
        finished_at = now(),
        cancel_reason = i.reason
    FROM picked AS i
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING j.id, j.queue, j.state, j.attempt, j.run_at, j.lease_number, j.lease_expires_at, j.worker,
        j.cancel_reason, j.claim_order,
        i.n, i.wait_name
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'cancel_own', state, attempt, lease_number, worker, jsonb_strip_nulls(jsonb_build_object('reason', cancel_reason)) FROM moved
)
SELECT moved.n, moved.id, moved.state, moved.attempt, NULL::timestamptz
FROM moved
