-- As before, but its notifications say where in the queue the first of the new jobs is.
CREATE OR REPLACE FUNCTION towpath.insert_jobs(items jsonb, keys jsonb)
RETURNS TABLE (r integer, n integer, id uuid, queue text, state text, run_at timestamptz, max_attempts integer,
               created_at timestamptz, inserted boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    job record;
    hint record;
    scheduled boolean := false;
    lowest jsonb := '{}';
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
    FOR job IN
        WITH given AS MATERIALIZED (
            SELECT i.*, greatest(now(), coalesce(i.run_at, now() + i.delay_seconds * interval '1 s')) AS due_at,
                   coalesce(i.max_attempts, q.max_attempts, 20) AS attempts,
                   (i.priority - 1) * CASE WHEN q.name IS NULL THEN interval '600 s'
                        ELSE coalesce(q.aging_seconds * interval '1 s', interval '36500 days') END AS handicap,
                   by_request->i.r::text->>'key' AS key,
                   coalesce((by_request->i.r::text->>'first')::boolean, true) AS first
            FROM jsonb_to_recordset(items) AS i(r integer, n integer, id uuid, queue text, kind text, args jsonb,
                    priority integer, run_at timestamptz, delay_seconds double precision, max_attempts integer,
                    timeout_seconds double precision, backoff jsonb, start_by timestamptz, tags text[], metadata jsonb)
            LEFT JOIN towpath.queues AS q ON q.name = i.queue
        ), won AS (
            INSERT INTO towpath.idempotency_keys (key, digests, answer, expires_at)
            SELECT g.key, digests->g.r::text,
                   jsonb_agg(jsonb_build_object('id', g.id, 'queue', g.queue, 'kind', g.kind,
                        'state', CASE WHEN g.due_at > now() THEN 'scheduled' ELSE 'available' END,
                        'priority', g.priority, 'max_attempts', g.attempts,
                        'run_at', to_char(g.due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
                        'created_at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')) ORDER BY g.n),
                   now() + (by_request->g.r::text->>'keep_seconds')::float8 * interval '1 s'
            FROM given AS g WHERE g.key IS NOT NULL AND g.first GROUP BY g.r, g.key
            ORDER BY g.key -- two flushes with the same keys must not wait for each other
            ON CONFLICT DO NOTHING
            RETURNING key
        ), entered AS (
            INSERT INTO towpath.jobs (id, queue, kind, state, priority, max_attempts, run_at, claim_order,
                timeout_seconds, start_by, tags, backoff, metadata, args)
            SELECT g.id, g.queue, g.kind, CASE WHEN g.due_at > now() THEN 'scheduled' ELSE 'available' END,
                g.priority, g.attempts, g.due_at, g.due_at + g.handicap,
                g.timeout_seconds, g.start_by, coalesce(g.tags, '{}'), g.backoff, g.metadata,
                coalesce(g.args, 'null') -- the record set reads JSON null as SQL NULL
            FROM given AS g
            WHERE g.first AND (g.key IS NULL OR g.key IN (SELECT key FROM won))
            -- Only a flush that is repeated because its connection died can meet its own ids.
            ON CONFLICT (id) DO NOTHING
        )
        SELECT g.r, g.n, g.id, g.queue, CASE WHEN g.due_at > now() THEN 'scheduled' ELSE 'available' END AS state,
               g.due_at, (extract(epoch FROM g.due_at + g.handicap) * 1000000)::bigint AS claim_order, g.attempts,
               g.first AND (g.key IS NULL OR g.key IN (SELECT key FROM won)) AS inserted
        FROM given AS g
    LOOP
        r := job.r; n := job.n; id := job.id; queue := job.queue; state := job.state; run_at := job.due_at;
        max_attempts := job.attempts; created_at := now(); inserted := job.inserted;
        RETURN NEXT;
        IF inserted AND state = 'available' THEN
            lowest := lowest || jsonb_build_object(queue, least((lowest->queue)::bigint, job.claim_order));
        ELSIF inserted THEN
            scheduled := true;
        END IF;
    END LOOP;
    -- Once a queue and transaction, with the place of the first: nobody has to look in front of it.
    FOR hint IN SELECT key, value FROM jsonb_each_text(lowest) LOOP
        PERFORM pg_notify('towpath', 'available ' || hint.key || ' ' || hint.value);
    END LOOP;
    IF scheduled THEN
        PERFORM pg_notify('towpath', 'due');
    END IF;
END $$;
