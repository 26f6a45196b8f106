WITH picked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(items)s) AS given(n integer, id uuid, lease_number bigint, delay_seconds double precision, result jsonb, error jsonb, reason text, wait_ids uuid[], answers_needed smallint, attached boolean, payload jsonb, wait_name text)
), moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'failed',
        settled_as = 'fail',
        lease_expires_at = NULL,
        deadline_at = NULL,
        finished_at = now(),
        dead_letter_reason = CASE WHEN true AND (SELECT q.keep_dead_letters FROM towpath.queues AS q WHERE q.name = j.queue) IS NOT false THEN 'failed' END,
        errors_total = j.errors_total + 1,
        errors = CASE WHEN jsonb_array_length(j.errors) >= 20 THEN j.errors - 0 ELSE coalesce(j.errors, '[]') END || jsonb_build_array(i.error || jsonb_build_object('attempt', j.attempt, 'at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'worker', j.worker))
    FROM picked AS i
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING j.id, j.queue, j.state, j.attempt, j.run_at, j.lease_number, j.lease_expires_at, j.worker,
        j.cancel_reason, j.claim_order,
        i.n, i.wait_name
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'fail', state, attempt, lease_number, worker, NULL::jsonb FROM moved
)
SELECT moved.n, moved.id, moved.state, moved.attempt, NULL::timestamptz
FROM moved
