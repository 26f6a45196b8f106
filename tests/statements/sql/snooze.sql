WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'scheduled',
        attempt = j.attempt - 1,
        settled_as = 'snooze',
        lease_expires_at = NULL,
        deadline_at = NULL,
        run_at = now() + i.delay_seconds * interval '1 s',
        claim_order = now() + i.delay_seconds * interval '1 s' + (j.claim_order - j.run_at),
        snoozes = j.snoozes + 1
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, delay_seconds double precision)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, j.id, j.state, j.attempt, j.run_at, j.lease_number, j.worker
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'snooze', state, attempt + 1, lease_number, worker, CASE WHEN state <> 'failed' THEN jsonb_build_object('run_at', run_at) END FROM moved
)
SELECT moved.n, moved.state, moved.attempt, moved.run_at, CASE WHEN moved.state <> 'failed' THEN pg_notify('towpath', 'due')::text END
FROM moved
