WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'waiting_external',
        settled_as = 'park',
        waiting_on = i.wait_ids,
        answers_needed = i.answers_needed,
        lease_expires_at = CASE WHEN i.attached THEN j.lease_expires_at END,
        deadline_at = NULL
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, wait_ids uuid[], answers_needed smallint, attached boolean, wait_name text)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, i.wait_name, j.id, j.state, j.attempt, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'park', state, attempt, lease_number, worker, jsonb_strip_nulls(jsonb_build_object('wait', wait_name)) FROM moved
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
