-- A job may wait for several answers: `answers_needed` of the waits in `waiting_on`.
ALTER TABLE towpath.jobs DROP CONSTRAINT jobs_waiting_on;
ALTER TABLE towpath.jobs
    ALTER COLUMN waiting_on TYPE uuid[] USING CASE WHEN waiting_on IS NOT NULL THEN ARRAY[waiting_on] END,
    ADD COLUMN answers_needed smallint;
UPDATE towpath.jobs SET answers_needed = 1 WHERE waiting_on IS NOT NULL;
ALTER TABLE towpath.jobs ADD CONSTRAINT jobs_answers_needed CHECK ((waiting_on IS NULL) = (answers_needed IS NULL)
    AND (answers_needed IS NULL OR answers_needed BETWEEN 1 AND cardinality(waiting_on)));

-- Secrets of senders, encrypted with a key that is not in the database. After a change the previous value may
-- still count for a while.
CREATE TABLE towpath.secrets (
    name           text PRIMARY KEY
        CONSTRAINT secrets_name CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$'),
    value          bytea NOT NULL,
    previous       bytea,
    previous_until timestamptz,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT secrets_previous CHECK ((previous IS NULL) = (previous_until IS NULL))
);

-- Where webhooks arrive that cannot carry a callback URL.
CREATE TABLE towpath.hooks (
    name         text PRIMARY KEY
        CONSTRAINT hooks_name CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$'),
    secret       text CONSTRAINT hooks_secret REFERENCES towpath.secrets (name),
    signature    jsonb,
    correlation  text NOT NULL,
    filter       text,
    delivery_id  text,
    keep_seconds double precision NOT NULL
        CONSTRAINT hooks_keep_seconds CHECK (keep_seconds BETWEEN 60 AND 2592000),
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT hooks_signature CHECK ((signature IS NULL) = (secret IS NULL))
);

-- What arrived at a hook: kept for a wait that is opened later, and so that a repeated delivery does nothing twice.
CREATE TABLE towpath.hook_deliveries (
    id              uuid PRIMARY KEY,
    hook            text NOT NULL CONSTRAINT hook_deliveries_hook REFERENCES towpath.hooks (name) ON DELETE CASCADE,
    delivery_id     text NOT NULL,
    correlation_key text NOT NULL,
    received_at     timestamptz NOT NULL DEFAULT now(),
    expires_at      timestamptz NOT NULL,
    matched         integer NOT NULL DEFAULT 0,
    encoding        text NOT NULL,
    content_type    text,
    headers         jsonb,
    event           jsonb,
    payload         jsonb,
    body            bytea,
    CONSTRAINT hook_deliveries_once UNIQUE (hook, delivery_id)
);
-- Did the answer come before its wait?
CREATE INDEX hook_deliveries_unmatched ON towpath.hook_deliveries (hook, correlation_key, id) WHERE matched = 0;
-- Which delivery is old?
CREATE INDEX hook_deliveries_expiry ON towpath.hook_deliveries (expires_at);

ALTER TABLE towpath.waits
    DROP COLUMN delivered,
    ADD COLUMN url_version smallint NOT NULL DEFAULT 0, -- raised to make all URLs given out before worthless
    ADD COLUMN hard_deadline_at timestamptz, -- no heartbeat moves the deadline beyond it
    ADD COLUMN max_timeout_seconds double precision
        CONSTRAINT waits_max_timeout CHECK (max_timeout_seconds BETWEEN timeout_seconds AND 31536000),
    ADD COLUMN hook text,
    ADD COLUMN correlation_key text,
    ADD COLUMN settings jsonb NOT NULL DEFAULT '{}', -- policy, signature, confirm
    ADD COLUMN encoding text,
    ADD COLUMN content_type text,
    ADD COLUMN headers jsonb,
    ADD COLUMN event jsonb,
    ADD COLUMN body bytea,
    ADD CONSTRAINT waits_correlation CHECK ((hook IS NULL) = (correlation_key IS NULL)),
    ADD CONSTRAINT waits_hard_deadline CHECK ((hard_deadline_at IS NULL) = (max_timeout_seconds IS NULL)
        AND (hard_deadline_at IS NULL OR deadline_at <= hard_deadline_at));
-- Who waits for this key?
CREATE INDEX waits_correlated ON towpath.waits (hook, correlation_key) WHERE state = 'open' AND hook IS NOT NULL;

-- Callbacks that resolved nothing: filtered out, or refused because the wait's policy could not decide. A few each.
CREATE TABLE towpath.refused_callbacks (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    wait_id      uuid NOT NULL CONSTRAINT refused_callbacks_wait REFERENCES towpath.waits (id) ON DELETE CASCADE,
    received_at  timestamptz NOT NULL DEFAULT now(),
    verb         text NOT NULL,
    reason       text NOT NULL,
    encoding     text NOT NULL,
    content_type text,
    headers      jsonb,
    body         bytea
);
-- Which ones came to this wait?
CREATE INDEX refused_callbacks_of_wait ON towpath.refused_callbacks (wait_id, id);

-- What a parked job waits on are waits of its own, and they stay. Only a park enters the function.
CREATE FUNCTION towpath.refuse_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'waits' THEN
        IF EXISTS (SELECT FROM towpath.jobs AS j WHERE j.id = OLD.job_id AND OLD.id = ANY(j.waiting_on)) THEN
            RAISE EXCEPTION 'job % is parked on wait %', OLD.job_id, OLD.id
                USING ERRCODE = 'check_violation', CONSTRAINT = 'waits_parked_on';
        END IF;
        RETURN OLD;
    END IF;
    IF (SELECT count(*) FROM towpath.waits AS w WHERE w.id = ANY(NEW.waiting_on) AND w.job_id = NEW.id)
        <> cardinality(NEW.waiting_on) THEN
        RAISE EXCEPTION 'job % cannot wait on what is no wait of its own', NEW.id
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_waiting_on';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER jobs_waiting_on BEFORE UPDATE ON towpath.jobs FOR EACH ROW
    WHEN (NEW.waiting_on IS NOT NULL AND NEW.waiting_on IS DISTINCT FROM OLD.waiting_on)
    EXECUTE FUNCTION towpath.refuse_wait();
CREATE TRIGGER waits_parked_on BEFORE DELETE ON towpath.waits FOR EACH ROW EXECUTE FUNCTION towpath.refuse_wait();
