WITH picked AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%(items)s) AS given(n integer, id uuid, lease_number bigint, delay_seconds double precision, result jsonb, error jsonb, reason text, wait_ids uuid[], answers_needed smallint, attached boolean, payload jsonb, wait_name text)
), moved AS (
    UPDATE towpath.jobs AS j SET
        state = 'available',
        attempt = j.attempt - 1,
        settled_as = 'release',
        lease_expires_at = NULL,
        deadline_at = NULL
    FROM picked AS i
    WHERE j.id = i.id AND (j.state || '') IN ('running') AND j.lease_number = i.lease_number
    RETURNING j.id, j.queue, j.state, j.attempt, j.run_at, j.lease_number, j.lease_expires_at, j.worker,
        j.cancel_reason, j.claim_order,
        i.n, i.wait_name
), logged AS (
    INSERT INTO towpath.job_events (job_id, step, state, attempt, lease_number, worker, details)
    SELECT id, 'release', state, attempt + 1, lease_number, worker, NULL::jsonb FROM moved
), hinted AS MATERIALIZED (
    SELECT queue, pg_notify('towpath', 'available ' || queue || ' '
        || (extract(epoch FROM min(claim_order)) * 1000000)::bigint)::text AS told
    FROM moved GROUP BY queue
)
SELECT moved.n, moved.id, moved.state, moved.attempt, NULL::timestamptz, hinted.told
FROM moved LEFT JOIN hinted USING (queue)
