WITH picked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(items)s) AS given(n integer, id uuid, lease_number bigint, delay_seconds double precision, result jsonb, error jsonb, reason text, wait_ids uuid[], answers_needed smallint, attached boolean, payload jsonb, wait_name text)
), moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'running',
        settled_as = NULL,
        waiting_on = NULL,
        answers_needed = NULL,
        deadline_at = now() + coalesce(j.timeout_seconds, (SELECT q.timeout_seconds FROM towpath.queues AS q WHERE q.name = j.queue)) * interval '1 s'
    FROM picked AS i
    WHERE j.id = i.id AND (j.state || '') IN ('waiting_external')
    RETURNING j.id, j.queue, j.state, j.attempt, j.run_at, j.lease_number, j.lease_expires_at, j.worker,
        j.cancel_reason, j.claim_order,
        i.n, i.wait_name
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'callback_resume_attached', state, attempt, lease_number, NULL, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
)
SELECT moved.n, moved.id, moved.state, moved.attempt, NULL::timestamptz
FROM moved
