-- What was parked on several waits, or opened by other rules, can't be told in the older form: refuse to lose it.
DO $$ BEGIN
    IF EXISTS (SELECT FROM towpath.jobs WHERE cardinality(waiting_on) > 1) THEN
        RAISE EXCEPTION 'some jobs wait for several answers: let them finish, or cancel them, before this downgrade';
    END IF;
END $$;
DROP TRIGGER jobs_waiting_on ON towpath.jobs;
DROP TRIGGER waits_parked_on ON towpath.waits;
DROP FUNCTION towpath.refuse_wait;
DROP TABLE towpath.refused_callbacks, towpath.hook_deliveries, towpath.hooks, towpath.secrets;
DROP INDEX towpath.waits_correlated;
ALTER TABLE towpath.waits
    DROP CONSTRAINT waits_correlation, DROP CONSTRAINT waits_hard_deadline,
    DROP COLUMN url_version, DROP COLUMN hard_deadline_at, DROP COLUMN max_timeout_seconds, DROP COLUMN hook,
    DROP COLUMN correlation_key, DROP COLUMN settings, DROP COLUMN encoding, DROP COLUMN content_type,
    DROP COLUMN headers, DROP COLUMN event, DROP COLUMN body,
    ADD COLUMN delivered boolean NOT NULL DEFAULT false;
ALTER TABLE towpath.jobs DROP CONSTRAINT jobs_answers_needed, DROP COLUMN answers_needed;
ALTER TABLE towpath.jobs ALTER COLUMN waiting_on TYPE uuid USING waiting_on[1];
ALTER TABLE towpath.jobs ADD CONSTRAINT jobs_waiting_on FOREIGN KEY (waiting_on) REFERENCES towpath.waits (id);
