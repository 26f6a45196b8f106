WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'scheduled'
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid)
    WHERE j.id = i.id AND (j.state || '') IN ('available')
    RETURNING i.n, j.id, j.state, j.attempt, j.run_at, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'postpone', state, attempt, lease_number, NULL, CASE WHEN state <> 'failed' THEN jsonb_build_object('run_at', run_at) END FROM moved
)
SELECT moved.n, moved.state, moved.attempt, moved.run_at, CASE WHEN moved.state <> 'failed' THEN pg_notify('towpath', 'due')::text END
FROM moved
