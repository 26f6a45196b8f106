WITH moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'completed',
        settled_as = 'complete',
        lease_expires_at = NULL,
        deadline_at = NULL,
        finished_at = now(),
        result = i.result
    FROM jsonb_to_recordset(%(items)s) AS i(n integer, id uuid, lease_number bigint, result jsonb)
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING i.n, j.state, j.attempt
)
SELECT moved.n, moved.state, moved.attempt, NULL::timestamptz
FROM moved
