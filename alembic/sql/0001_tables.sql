-- One row per queue, made on first use. Every setting here can be edited while jobs run.
CREATE TABLE towpath.queues (
    name                          text PRIMARY KEY
        CONSTRAINT queues_name CHECK (name ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'),
    paused                        boolean NOT NULL DEFAULT false,
    paused_at                     timestamptz,
    max_attempts                  integer NOT NULL DEFAULT 20
        CONSTRAINT queues_max_attempts CHECK (max_attempts BETWEEN 1 AND 1000),
    lease_seconds                 double precision NOT NULL DEFAULT 60
        CONSTRAINT queues_lease_seconds CHECK (lease_seconds BETWEEN 1 AND 86400),
    timeout_seconds               double precision DEFAULT 3600
        CONSTRAINT queues_timeout_seconds CHECK (timeout_seconds BETWEEN 1 AND 31536000),
    backoff                       jsonb NOT NULL
        DEFAULT '{"kind": "exponential", "base_seconds": 2, "factor": 2, "cap_seconds": 86400, "jitter": 0.25}',
    aging_seconds                 double precision DEFAULT 600
        CONSTRAINT queues_aging_seconds CHECK (aging_seconds BETWEEN 1 AND 31536000),
    completed_retention_seconds   double precision DEFAULT 86400
        CONSTRAINT queues_completed_retention CHECK (completed_retention_seconds BETWEEN 0 AND 315360000),
    failed_retention_seconds      double precision DEFAULT 604800
        CONSTRAINT queues_failed_retention CHECK (failed_retention_seconds BETWEEN 0 AND 315360000),
    cancelled_retention_seconds   double precision DEFAULT 604800
        CONSTRAINT queues_cancelled_retention CHECK (cancelled_retention_seconds BETWEEN 0 AND 315360000),
    keep_dead_letters             boolean NOT NULL DEFAULT true,
    dead_letter_retention_seconds double precision
        CONSTRAINT queues_dead_letter_retention CHECK (dead_letter_retention_seconds BETWEEN 0 AND 315360000),
    created_at                    timestamptz NOT NULL DEFAULT now(),
    updated_at                    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT queues_paused_at CHECK (paused = (paused_at IS NOT NULL))
);

-- One row per job, from enqueue to retention. Narrow columns that every step rewrites come first.
CREATE TABLE towpath.jobs (
    id                 uuid PRIMARY KEY,
    queue              text NOT NULL
        CONSTRAINT jobs_queue CHECK (queue ~ '^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$'),
    kind               text NOT NULL
        CONSTRAINT jobs_kind CHECK (kind ~ '^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,199}$'),
    state              text NOT NULL,
    priority           smallint NOT NULL DEFAULT 2,
    attempt            integer NOT NULL DEFAULT 0,
    max_attempts       integer NOT NULL,
    snoozes            integer NOT NULL DEFAULT 0,
    lease_number       bigint NOT NULL DEFAULT 0,
    errors_total       integer NOT NULL DEFAULT 0,
    run_at             timestamptz NOT NULL,
    claim_order        timestamptz NOT NULL,
    created_at         timestamptz NOT NULL DEFAULT now(),
    claimed_at         timestamptz,
    lease_expires_at   timestamptz,
    deadline_at        timestamptz,
    start_by           timestamptz,
    finished_at        timestamptz,
    lease_seconds      double precision,
    timeout_seconds    double precision
        CONSTRAINT jobs_timeout_seconds CHECK (timeout_seconds BETWEEN 1 AND 31536000),
    claim_id           uuid,
    waiting_on         uuid,
    worker             text,
    settled_as         text,
    cancel_reason      text,
    dead_letter_reason text,
    tags               text[] NOT NULL DEFAULT '{}',
    backoff            jsonb,
    metadata           jsonb,
    progress           jsonb,
    checkpoint         jsonb,
    callback_results   jsonb,
    errors             jsonb,
    result             jsonb,
    args               jsonb NOT NULL,
    CONSTRAINT jobs_state CHECK (state IN ('available', 'cancelled', 'completed', 'failed', 'retryable',
        'running', 'scheduled', 'waiting_external')),
    CONSTRAINT jobs_priority CHECK (priority BETWEEN 1 AND 4),
    CONSTRAINT jobs_max_attempts CHECK (max_attempts BETWEEN 1 AND 1000),
    CONSTRAINT jobs_attempt CHECK (attempt BETWEEN 0 AND max_attempts),
    -- What may be claimed has an attempt left, so that a claim can't fail for one job of its set.
    CONSTRAINT jobs_attempt_left CHECK (attempt < max_attempts OR NOT (state IN ('available', 'retryable', 'scheduled'))),
    CONSTRAINT jobs_final_time CHECK ((state IN ('cancelled', 'completed', 'failed')) = (finished_at IS NOT NULL)),
    CONSTRAINT jobs_running_lease CHECK (state <> 'running'
        OR (lease_expires_at IS NOT NULL AND claim_id IS NOT NULL AND lease_number > 0 AND attempt > 0)),
    CONSTRAINT jobs_lease_ended CHECK (lease_expires_at IS NULL OR state IN ('running', 'waiting_external')),
    CONSTRAINT jobs_wait CHECK ((state = 'waiting_external') = (waiting_on IS NOT NULL)),
    CONSTRAINT jobs_dead_letter CHECK (dead_letter_reason IS NULL OR state = 'failed')
) WITH (
    -- Room for the heartbeat's HOT updates; dead rows of a busy queue must go soon, whatever the table's size.
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 1
);

-- What is next?
CREATE INDEX jobs_next ON towpath.jobs (queue, claim_order, id) WHERE state = 'available';
-- Who holds what: expired leases, passed deadlines, a repeated claim. Lease columns are in no index, so that a
-- heartbeat is a HOT update; the sweep reads this one, which is small.
CREATE INDEX jobs_held ON towpath.jobs (queue, claim_id) WHERE state = 'running';
-- What is due?
CREATE INDEX jobs_due ON towpath.jobs (run_at) WHERE state IN ('retryable', 'scheduled');
-- What was not started in time?
CREATE INDEX jobs_start_by ON towpath.jobs (start_by)
    WHERE start_by IS NOT NULL AND state IN ('available', 'retryable', 'scheduled');
-- What may retention delete; which jobs of a queue ended how?
CREATE INDEX jobs_final ON towpath.jobs (queue, state, finished_at) WHERE state IN ('cancelled', 'completed', 'failed');

-- What a parked job waits on. A wait belongs to one lease: a new claim makes it stale without touching it.
CREATE TABLE towpath.waits (
    id           uuid PRIMARY KEY,
    job_id       uuid NOT NULL REFERENCES towpath.jobs (id) ON DELETE CASCADE,
    lease_number bigint NOT NULL,
    attempt      integer NOT NULL,
    name         text NOT NULL,
    state        text NOT NULL DEFAULT 'open'
        CONSTRAINT waits_state CHECK (state IN ('expired', 'open', 'resolved')),
    default_verb text NOT NULL DEFAULT 'resume'
        CONSTRAINT waits_default_verb CHECK (default_verb IN ('complete', 'fail', 'resume', 'retry')),
    created_at   timestamptz NOT NULL DEFAULT now(),
    timeout_seconds double precision NOT NULL
        CONSTRAINT waits_timeout CHECK (timeout_seconds BETWEEN 1 AND 31536000),
    deadline_at  timestamptz NOT NULL,
    resolved_as  text
        CONSTRAINT waits_resolved_as CHECK (resolved_as IN ('complete', 'fail', 'resume', 'retry')),
    resolved_at  timestamptz,
    early        boolean NOT NULL DEFAULT false, -- it came before the park
    delivered    boolean NOT NULL DEFAULT false, -- and the park has found it
    payload      jsonb,
    CONSTRAINT waits_resolution CHECK ((state = 'resolved') = (resolved_as IS NOT NULL AND resolved_at IS NOT NULL)),
    CONSTRAINT waits_name_once UNIQUE (job_id, lease_number, name)
);
-- Which wait is over?
CREATE INDEX waits_over ON towpath.waits (deadline_at) WHERE state = 'open';

ALTER TABLE towpath.jobs ADD CONSTRAINT jobs_waiting_on FOREIGN KEY (waiting_on) REFERENCES towpath.waits (id);

-- Only what the job's row can't tell. The lease number and the step answer a repeated report of an old lease.
CREATE TABLE towpath.job_events (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id       uuid NOT NULL REFERENCES towpath.jobs (id) ON DELETE CASCADE,
    at           timestamptz NOT NULL DEFAULT now(),
    step         text NOT NULL,
    state        text NOT NULL,
    attempt      integer NOT NULL,
    lease_number bigint NOT NULL,
    worker       text,
    details      jsonb
);
CREATE INDEX job_events_of_job ON towpath.job_events (job_id, id);

-- One answer per Idempotency-Key. `digests` tells what differs in a repeat without keeping the request.
CREATE TABLE towpath.idempotency_keys (
    key        text PRIMARY KEY CONSTRAINT idempotency_keys_key CHECK (octet_length(key) BETWEEN 1 AND 255),
    digests    jsonb NOT NULL,
    answer     jsonb NOT NULL,
    expires_at timestamptz NOT NULL
);
CREATE INDEX idempotency_keys_expiry ON towpath.idempotency_keys (expires_at);

-- Fingerprints, never keys: a process that signs with an unknown key must not serve this database.
CREATE TABLE towpath.signing_keys (
    fingerprint   text PRIMARY KEY,
    first_used_at timestamptz NOT NULL DEFAULT now()
);
