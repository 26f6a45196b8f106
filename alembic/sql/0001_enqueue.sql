-- Time-ordered ids (RFC 9562, version 7): milliseconds in 48 bits, what is left of the microseconds in the next 12,
-- so that the jobs of one batch keep their order; the rest random.
CREATE FUNCTION towpath.uuid7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT encode(set_byte(set_byte(overlay(uuid_send(gen_random_uuid())
            PLACING substring(int8send(us / 1000) FROM 3) FROM 1 FOR 6),
            6, 112 | (rest >> 8)), 7, rest & 255), 'hex')::uuid
    FROM (SELECT us, (us % 1000 * 4096 / 1000)::integer AS rest
        -- OFFSET 0: the clock is read once.
        FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us OFFSET 0) AS now) AS parts
$$;

-- Seconds until the next attempt, after `attempt` failed. In logarithms, since factor ^ attempt overflows. The
-- jitter is a hash of job and attempt, so that one statement can use the delay twice.
CREATE FUNCTION towpath.backoff_seconds(policy jsonb, attempt integer, job uuid) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT least(cap, least(cap, CASE policy->>'kind'
            WHEN 'linear' THEN base * attempt
            WHEN 'fixed' THEN base
            ELSE sign(base) * exp(least(ln(greatest(base, 1e-300)) + (attempt - 1) * ln(factor),
                ln(greatest(cap, 1e-9)) + 1))
        END) * (1 + jitter * abs(hashtextextended(job::text, attempt) % 1000) / 1000.0))
    FROM (SELECT coalesce((policy->>'base_seconds')::float8, 2) AS base,
                 coalesce((policy->>'factor')::float8, 2) AS factor,
                 coalesce((policy->>'cap_seconds')::float8, 86400) AS cap,
                 coalesce((policy->>'jitter')::float8, 0.25) AS jitter) AS p
$$;

-- What each request with an Idempotency-Key asked for, hashed field by field (one job) or job by job (a batch), so
-- that a repeat with another body can be told what differs: {request's number: {pointer: hash}}. Look-ups by number
-- here and below are in objects: a join of two lists would compare each with each.
CREATE FUNCTION towpath.request_digests(items jsonb, keys jsonb) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    -- By value, not as written: 5 and 5.0, or two spellings of an instant, are the same request.
    WITH asked AS (
        SELECT i.r, i.n, (is_batch->>i.r::text)::boolean AS batch, jsonb_build_object('queue', i.queue, 'kind', i.kind,
            'args', i.args, 'priority', i.priority, 'run_at', extract(epoch FROM i.run_at),
            'delay_seconds', i.delay_seconds, 'max_attempts', i.max_attempts, 'timeout_seconds', i.timeout_seconds,
            'backoff', (SELECT jsonb_object_agg(b.key, CASE WHEN jsonb_typeof(b.value) = 'number'
                THEN to_jsonb(b.value::float8) ELSE b.value END) FROM jsonb_each(i.backoff) AS b),
            'start_by', extract(epoch FROM i.start_by), 'tags', coalesce(i.tags, '{}'), 'metadata', i.metadata) AS job
        FROM (SELECT jsonb_object_agg(k->>'r', k->'batch') AS is_batch FROM jsonb_array_elements(keys) AS k) AS keyed
        CROSS JOIN jsonb_to_recordset(items) AS i(r integer, n integer, queue text, kind text, args jsonb,
            priority integer, run_at timestamptz, delay_seconds double precision, max_attempts integer,
            timeout_seconds double precision, backoff jsonb, start_by timestamptz, tags text[], metadata jsonb)
        WHERE is_batch ? i.r::text
    ), digested AS (
        SELECT r, jsonb_object_agg('/jobs/' || n, md5(job::text)) AS digests FROM asked WHERE batch GROUP BY r
        UNION ALL
        SELECT r, jsonb_object_agg('/' || f.key, md5(f.value::text)) FROM asked, jsonb_each(job) AS f
        WHERE NOT batch GROUP BY r
    )
    SELECT jsonb_object_agg(r::text, digests) FROM digested
$$;

-- Insert checked jobs: the one insert behind every way to enqueue.
--   items  [{r, n, id, queue, kind, args, …}]: `r` numbers the request, `n` the job within it
--   keys   [{r, key, batch, keep_seconds}]: the requests that carry an Idempotency-Key
-- A request whose key is taken inserts nothing (`inserted` is false): its answer is in `replay_answers`, which
-- must be asked in a later statement, since this one's snapshot may be older than the twin's commit.
CREATE FUNCTION towpath.insert_jobs(items jsonb, keys jsonb)
RETURNS TABLE (r integer, n integer, id uuid, queue text, state text, run_at timestamptz, max_attempts integer,
               created_at timestamptz, inserted boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    job record;
    hint text;
    notified text[] := '{}';
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
               g.due_at, g.attempts, g.first AND (g.key IS NULL OR g.key IN (SELECT key FROM won)) AS inserted
        FROM given AS g
    LOOP
        r := job.r; n := job.n; id := job.id; queue := job.queue; state := job.state; run_at := job.due_at;
        max_attempts := job.attempts; created_at := now(); inserted := job.inserted;
        RETURN NEXT;
        -- Once a queue and transaction: PostgreSQL drops equal payloads, but only after looking through all.
        hint := CASE state WHEN 'available' THEN 'available ' || queue ELSE 'due' END;
        IF inserted AND hint <> ALL (notified) THEN
            notified := notified || hint;
            PERFORM pg_notify('towpath', hint);
        END IF;
    END LOOP;
END $$;

-- The first answers of taken keys, and where the repeat differs from the first request (empty: it does not).
CREATE FUNCTION towpath.replay_answers(items jsonb, keys jsonb)
RETURNS TABLE (r integer, answer jsonb, differences text[]) LANGUAGE sql STABLE AS $$
    SELECT k.r, stored.answer, ARRAY(
        SELECT coalesce(old.key, new.key)
        FROM jsonb_each_text(stored.digests) AS old
        FULL JOIN jsonb_each_text(d.digests->k.r::text) AS new ON new.key = old.key
        WHERE old.value IS DISTINCT FROM new.value
        ORDER BY 1)
    FROM jsonb_to_recordset(keys) AS k(r integer, key text)
    CROSS JOIN (SELECT towpath.request_digests(items, keys) AS digests) AS d
    JOIN towpath.idempotency_keys AS stored ON stored.key = k.key
$$;

CREATE FUNCTION towpath.checked_number(item jsonb, field text, lowest numeric, highest numeric,
    whole boolean, pointer text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    given jsonb := item->field;
BEGIN
    IF given IS NULL THEN RETURN; END IF;
    IF jsonb_typeof(given) <> 'number' OR given::numeric NOT BETWEEN lowest AND highest
       OR (given::numeric <> 0 AND given::numeric < 1e-307) -- no double is that small
       OR (whole AND scale(given::numeric) > 0) THEN
        RAISE EXCEPTION '% must be a % from % to %', field, CASE WHEN whole THEN 'whole number' ELSE 'number' END,
            lowest, highest USING ERRCODE = 'invalid_parameter_value', DETAIL = pointer || '/' || field;
    END IF;
END $$;

-- One job as a producer writes it, checked like the body of POST /v1/jobs and completed with its defaults.
CREATE FUNCTION towpath.checked_job(item jsonb, pointer text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    field text;
    problem text;
    checked jsonb;
BEGIN
    IF jsonb_typeof(item) <> 'object' THEN
        RAISE EXCEPTION 'a job must be an object' USING ERRCODE = 'invalid_parameter_value', DETAIL = pointer;
    END IF;
    SELECT key INTO field FROM jsonb_object_keys(item) AS key
    WHERE key NOT IN ('queue', 'kind', 'args', 'priority', 'run_at', 'delay_seconds', 'max_attempts',
        'timeout_seconds', 'backoff', 'start_by', 'tags', 'metadata') LIMIT 1;
    IF field IS NOT NULL THEN
        RAISE EXCEPTION 'there is no field %', field
            USING ERRCODE = 'invalid_parameter_value',
            DETAIL = pointer || '/' || replace(replace(field, '~', '~0'), '/', '~1');
    END IF;
    -- For these an absent field and a null one are the same.
    checked := '{"queue": "default", "priority": 2, "args": {}}'::jsonb || item - ARRAY(
        SELECT key FROM jsonb_each(item) WHERE value = 'null' AND key IN ('run_at', 'delay_seconds', 'max_attempts',
            'timeout_seconds', 'backoff', 'start_by', 'metadata'));

    SELECT f, p INTO field, problem FROM (VALUES
        ('queue', CASE WHEN jsonb_typeof(checked->'queue') <> 'string'
            OR checked->>'queue' !~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$' THEN 'is not a queue name' END),
        ('kind', CASE WHEN jsonb_typeof(checked->'kind') IS DISTINCT FROM 'string'
            OR checked->>'kind' !~ '^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,199}$' THEN 'is not a kind' END),
        ('delay_seconds', CASE WHEN checked ? 'delay_seconds' AND checked ? 'run_at'
            THEN 'cannot be given with run_at' END),
        ('args', CASE WHEN octet_length((checked->'args')::text) > 1048576 THEN 'is larger than 1 MiB' END),
        ('metadata', CASE WHEN jsonb_typeof(checked->'metadata') <> 'object' THEN 'must be an object' END),
        ('backoff', CASE WHEN jsonb_typeof(checked->'backoff') <> 'object' THEN 'must be an object' END),
        ('backoff/kind', CASE WHEN checked->'backoff'->'kind' NOT IN ('"exponential"', '"linear"', '"fixed"')
            THEN 'is not a kind' END),
        ('tags', CASE WHEN jsonb_typeof(checked->'tags') <> 'array' THEN 'must be an array'
            WHEN jsonb_array_length(checked->'tags') > 20 THEN 'has more than 20 items' END),
        ((SELECT 'tags/' || min(place) - 1
            FROM jsonb_array_elements(CASE jsonb_typeof(checked->'tags') WHEN 'array' THEN checked->'tags' END)
                WITH ORDINALITY AS tags(tag, place)
            WHERE jsonb_typeof(tag) <> 'string' OR char_length(tag#>>'{}') NOT BETWEEN 1 AND 100),
            'must be a text of 1 to 100 characters'),
        ('args', CASE WHEN jsonb_path_exists(checked->'args',
            'strict $.**{64 to last} ? (@.type() == "object" || @.type() == "array")')
            THEN 'is nested deeper than 64' END),
        -- As text a number beyond the limits has many digits in a row: the walk is seldom needed.
        ('args', CASE WHEN (checked->'args')::text ~ '\d{255}' AND jsonb_path_exists(checked->'args',
            'strict $.** ? (@ >= 1e1000 || @ <= -1e1000 || @ != 0 && @ > -4.9e-324 && @ < 4.9e-324)')
            THEN 'has a number beyond the limits' END),
        ('metadata', CASE WHEN jsonb_path_exists(checked->'metadata',
            'strict $.**{64 to last} ? (@.type() == "object" || @.type() == "array")')
            THEN 'is nested deeper than 64' END),
        ('metadata', CASE WHEN (checked->'metadata')::text ~ '\d{255}' AND jsonb_path_exists(checked->'metadata',
            'strict $.** ? (@ >= 1e1000 || @ <= -1e1000 || @ != 0 && @ > -4.9e-324 && @ < 4.9e-324)')
            THEN 'has a number beyond the limits' END)
    ) AS checks(f, p) WHERE f IS NOT NULL AND p IS NOT NULL LIMIT 1;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION '% %', field, problem
            USING ERRCODE = 'invalid_parameter_value', DETAIL = pointer || '/' || field;
    END IF;

    PERFORM towpath.checked_number(checked, 'priority', 1, 4, true, pointer),
        towpath.checked_number(checked, 'max_attempts', 1, 1000, true, pointer),
        towpath.checked_number(checked, 'delay_seconds', 0, 315360000, false, pointer),
        towpath.checked_number(checked, 'timeout_seconds', 1, 31536000, false, pointer);
    IF checked ? 'backoff' THEN
        checked := jsonb_set(checked, '{backoff}', '{"kind": "exponential", "base_seconds": 2, "factor": 2,
            "cap_seconds": 86400, "jitter": 0.25}'::jsonb || (checked->'backoff'));
        SELECT key INTO field FROM jsonb_object_keys(checked->'backoff') AS key
        WHERE key NOT IN ('kind', 'base_seconds', 'factor', 'cap_seconds', 'jitter') LIMIT 1;
        IF field IS NOT NULL THEN
            RAISE EXCEPTION 'there is no field %', field
                USING ERRCODE = 'invalid_parameter_value',
                DETAIL = pointer || '/backoff/' || replace(replace(field, '~', '~0'), '/', '~1');
        END IF;
        PERFORM towpath.checked_number(checked->'backoff', 'base_seconds', 0, 31536000, false, pointer || '/backoff'),
            towpath.checked_number(checked->'backoff', 'factor', 1, 100, false, pointer || '/backoff'),
            towpath.checked_number(checked->'backoff', 'cap_seconds', 0, 31536000, false, pointer || '/backoff'),
            towpath.checked_number(checked->'backoff', 'jitter', 0, 1, false, pointer || '/backoff');
    END IF;
    FOREACH field IN ARRAY '{run_at,start_by}'::text[] LOOP
        CONTINUE WHEN NOT checked ? field;
        -- With an offset, always: a time without one means another instant to each reader.
        BEGIN
            IF jsonb_typeof(checked->field) <> 'string' OR checked->>field !~*
                '^\d{4}-\d\d-\d\d[T ]([01]\d|2[0-3]):\d\d:[0-5]\d(\.\d+)?(Z|[+-]\d\d:?\d\d)$'
                -- Beyond these years, in UTC, many a reader could not read it.
                OR (checked->>field)::timestamptz < '0001-01-01Z'
                OR (checked->>field)::timestamptz >= '10000-01-01Z' THEN
                RAISE invalid_datetime_format;
            END IF;
        EXCEPTION WHEN data_exception THEN
            RAISE EXCEPTION '% must be an RFC 3339 time with its offset', field
                USING ERRCODE = 'invalid_parameter_value', DETAIL = pointer || '/' || field;
        END;
    END LOOP;
    RETURN checked;
END $$;

-- What `enqueue` and `enqueue_many` share: check everything, insert everything, or give the first answer again.
CREATE FUNCTION towpath.enqueue_checked(jobs jsonb, idempotency_key text, batch boolean)
RETURNS TABLE (index integer, id uuid, state text, run_at timestamptz, existing boolean)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    items jsonb;
    keys jsonb := '[]';
    first_answer jsonb;
    differing text[];
BEGIN
    IF jobs IS NULL OR jsonb_typeof(jobs) <> 'array' OR jsonb_array_length(jobs) NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'jobs must be an array of 1 to 1000 jobs'
            USING ERRCODE = 'invalid_parameter_value', DETAIL = '/jobs';
    END IF;
    IF idempotency_key !~ '^[ -~]{1,255}$' THEN
        RAISE EXCEPTION 'an idempotency key has 1 to 255 printable ASCII characters'
            USING ERRCODE = 'invalid_parameter_value', DETAIL = '/idempotency_key';
    END IF;
    SELECT jsonb_agg(towpath.checked_job(item, CASE WHEN batch THEN '/jobs/' || (place - 1) ELSE '' END)
               || jsonb_build_object('r', 0, 'n', place - 1, 'id', towpath.uuid7()) ORDER BY place)
        INTO items FROM jsonb_array_elements(jobs) WITH ORDINALITY AS given(item, place);
    IF idempotency_key IS NOT NULL THEN
        keys := jsonb_build_array(jsonb_build_object('r', 0, 'key', idempotency_key, 'batch', batch,
            'keep_seconds', 86400));
    END IF;
    RETURN QUERY SELECT entered.n, entered.id, entered.state, entered.run_at, false
        FROM towpath.insert_jobs(items, keys) AS entered WHERE entered.inserted ORDER BY entered.n;
    IF FOUND THEN RETURN; END IF;

    SELECT answer, differences INTO first_answer, differing FROM towpath.replay_answers(items, keys);
    IF first_answer IS NULL THEN
        RAISE EXCEPTION 'the idempotency key has just expired: repeat the transaction'
            USING ERRCODE = 'serialization_failure';
    ELSIF differing <> '{}' THEN
        RAISE EXCEPTION 'this idempotency key was used with another request'
            USING ERRCODE = 'unique_violation', DETAIL = array_to_string(differing, ', ');
    END IF;
    RETURN QUERY SELECT (place - 1)::integer, (job->>'id')::uuid, job->>'state', (job->>'run_at')::timestamptz, true
        FROM jsonb_array_elements(first_answer) WITH ORDINALITY AS answered(job, place) ORDER BY place;
END $$;

-- For producers that share the database: jobs that exist if, and only if, your transaction commits.
--   jobs  an array of jobs, each as POST /v1/jobs takes it
-- Raises invalid_parameter_value, with a JSON pointer as its detail, before anything is stored; and
-- unique_violation when `idempotency_key` was used with other jobs. A repeat returns the first answer.
CREATE FUNCTION towpath.enqueue_many(jobs jsonb, idempotency_key text DEFAULT NULL)
RETURNS TABLE (index integer, id uuid, state text, run_at timestamptz, existing boolean)
LANGUAGE sql AS $$ SELECT * FROM towpath.enqueue_checked(jobs, idempotency_key, true) $$;

-- One job; returns its id. The same rules and errors as `enqueue_many`.
CREATE FUNCTION towpath.enqueue(kind text, args jsonb DEFAULT '{}', queue text DEFAULT NULL,
    priority integer DEFAULT NULL, run_at timestamptz DEFAULT NULL, delay_seconds double precision DEFAULT NULL,
    max_attempts integer DEFAULT NULL, timeout_seconds double precision DEFAULT NULL, backoff jsonb DEFAULT NULL,
    start_by timestamptz DEFAULT NULL, tags text[] DEFAULT NULL, metadata jsonb DEFAULT NULL,
    idempotency_key text DEFAULT NULL)
RETURNS uuid LANGUAGE sql AS $$
    SELECT id FROM towpath.enqueue_checked(jsonb_build_array(
        jsonb_build_object('args', args, 'backoff', backoff, 'metadata', metadata)
        || jsonb_strip_nulls(jsonb_build_object('kind', kind, 'queue', queue, 'priority', priority, 'run_at', run_at,
            'delay_seconds', delay_seconds, 'max_attempts', max_attempts, 'timeout_seconds', timeout_seconds,
            'start_by', start_by, 'tags', tags))),
        idempotency_key, false)
$$;
