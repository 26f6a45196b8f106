-- A bounded repetition costs twenty times what the same pattern without it does, and these are evaluated at every
-- step of a job: the length is told apart.
ALTER TABLE towpath.jobs
    DROP CONSTRAINT jobs_queue,
    DROP CONSTRAINT jobs_kind,
    ADD CONSTRAINT jobs_queue CHECK (queue ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]*$' AND length(queue) <= 100),
    ADD CONSTRAINT jobs_kind CHECK (kind ~ '^[A-Za-z0-9_][A-Za-z0-9_./:-]*$' AND length(kind) <= 200);

-- As before, but in one statement instead of a loop over the rows.
CREATE OR REPLACE FUNCTION towpath.insert_jobs(items jsonb, keys jsonb)
RETURNS TABLE (r integer, n integer, id uuid, queue text, state text, run_at timestamptz, max_attempts integer,
               created_at timestamptz, inserted boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    by_request jsonb := '{}';
    digests jsonb := '{}';
BEGIN
    IF keys <> '[]' THEN
        digests := towpath.request_digests(items, keys);
        -- Twins in one call: the first of a key enters, the others are told its answer.
        SELECT jsonb_object_agg(k->>'r', k || jsonb_build_object('first', first)) INTO by_request
        FROM (SELECT k, row_number() OVER (PARTITION BY k->>'key' ORDER BY (k->>'r')::integer) = 1 AS first
            FROM jsonb_array_elements(keys) AS k) AS numbered;
    END IF;
    RETURN QUERY
    WITH given AS MATERIALIZED (
        SELECT i.*, CASE WHEN i.due_at > now() THEN 'scheduled' ELSE 'available' END AS state,
               coalesce(i.max_attempts, q.max_attempts, 20) AS attempts,
               i.due_at + (i.priority - 1) * CASE WHEN q.name IS NULL THEN interval '600 s'
                    ELSE coalesce(q.aging_seconds * interval '1 s', interval '36500 days') END AS claim_order,
               by_request->i.r::text->>'key' AS key,
               coalesce((by_request->i.r::text->>'first')::boolean, true) AS first
        FROM (SELECT *, greatest(now(), coalesce(run_at, now() + delay_seconds * interval '1 s')) AS due_at
            FROM jsonb_to_recordset(items) AS i(r integer, n integer, id uuid, queue text, kind text, args jsonb,
                priority integer, run_at timestamptz, delay_seconds double precision, max_attempts integer,
                timeout_seconds double precision, backoff jsonb, start_by timestamptz, tags text[], metadata jsonb)) AS i
        LEFT JOIN towpath.queues AS q ON q.name = i.queue
    ), won AS (
        INSERT INTO towpath.idempotency_keys (key, digests, answer, expires_at)
        SELECT g.key, digests->g.r::text,
               jsonb_agg(jsonb_build_object('id', g.id, 'queue', g.queue, 'kind', g.kind, 'state', g.state,
                    'priority', g.priority, 'max_attempts', g.attempts,
                    'run_at', to_char(g.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                    'created_at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) ORDER BY g.n),
               now() + (by_request->g.r::text->>'keep_seconds')::float8 * interval '1 s'
        FROM given AS g WHERE g.key IS NOT NULL AND g.first GROUP BY g.r, g.key
        ORDER BY g.key -- two flushes with the same keys must not wait for each other
        ON CONFLICT DO NOTHING
        RETURNING key
    ), told AS MATERIALIZED (
        SELECT g.*, g.first AND (g.key IS NULL OR g.key IN (SELECT key FROM won)) AS inserted FROM given AS g
    ), entered AS (
        INSERT INTO towpath.jobs (id, queue, kind, state, priority, max_attempts, run_at, claim_order,
            timeout_seconds, start_by, tags, backoff, metadata, args)
        SELECT t.id, t.queue, t.kind, t.state, t.priority, t.attempts, t.due_at, t.claim_order,
            t.timeout_seconds, t.start_by, coalesce(t.tags, '{}'), t.backoff, t.metadata,
            coalesce(t.args, 'null') -- the record set reads JSON null as SQL NULL
        FROM told AS t WHERE t.inserted
        -- Only a flush that is repeated because its connection died can meet its own ids.
        ON CONFLICT (id) DO NOTHING
    ), hinted AS MATERIALIZED (
        -- Once a queue and transaction, with the place of the first: nobody has to look in front of it.
        SELECT pg_notify('towpath', 'available ' || t.queue || ' '
            || (extract(epoch FROM min(t.claim_order)) * 1000000)::bigint)
        FROM told AS t WHERE t.inserted AND t.state = 'available' GROUP BY t.queue
        UNION ALL
        (SELECT pg_notify('towpath', 'due') FROM told AS t WHERE t.inserted AND t.state = 'scheduled' LIMIT 1)
    )
    SELECT t.r, t.n, t.id, t.queue, t.state, t.due_at, t.attempts, now(), t.inserted
    FROM told AS t WHERE (SELECT count(*) FROM hinted) >= 0; -- so that it is read
END $$;
