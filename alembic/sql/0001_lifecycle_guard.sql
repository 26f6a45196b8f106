-- The lifecycle, enforced for whoever writes. The WHEN conditions are cheap expressions: a legal step never
-- enters PL/pgSQL. A test goes through the full product of states and compares with the lifecycle module.
CREATE FUNCTION towpath.refuse_step() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        RAISE EXCEPTION 'a job starts as scheduled or available, never claimed, not as % with attempt %, lease %',
            NEW.state, NEW.attempt, NEW.lease_number USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_start';
    ELSIF TG_OP = 'DELETE' THEN
        RAISE EXCEPTION 'job % is %: only a final job may be deleted', OLD.id, OLD.state
            USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_delete';
    END IF;
    RAISE EXCEPTION 'job % cannot go from % (lease %) to % (lease %)',
        OLD.id, OLD.state, OLD.lease_number, NEW.state, NEW.lease_number
        USING ERRCODE = 'check_violation', CONSTRAINT = 'jobs_step';
END $$;

CREATE TRIGGER jobs_start BEFORE INSERT ON towpath.jobs FOR EACH ROW
    WHEN (NEW.state NOT IN ('available', 'scheduled') OR NEW.attempt <> 0 OR NEW.lease_number <> 0)
    EXECUTE FUNCTION towpath.refuse_step();

CREATE TRIGGER jobs_delete BEFORE DELETE ON towpath.jobs FOR EACH ROW
    WHEN (OLD.state NOT IN ('cancelled', 'completed', 'failed'))
    EXECUTE FUNCTION towpath.refuse_step();

CREATE TRIGGER jobs_step BEFORE UPDATE ON towpath.jobs FOR EACH ROW
    WHEN (
        NEW.id <> OLD.id
        -- Only a claim raises the lease number, by one.
        OR NEW.lease_number <> OLD.lease_number + (OLD.state = 'available' AND NEW.state = 'running')::int
        OR (NEW.state <> OLD.state AND NOT CASE OLD.state
            WHEN 'available' THEN NEW.state IN ('cancelled', 'running', 'scheduled')
            WHEN 'cancelled' THEN NEW.state IN ('available')
            WHEN 'failed' THEN NEW.state IN ('available')
            WHEN 'retryable' THEN NEW.state IN ('available', 'cancelled')
            WHEN 'running' THEN NEW.state IN ('available', 'cancelled', 'completed', 'failed', 'retryable', 'scheduled', 'waiting_external')
            WHEN 'scheduled' THEN NEW.state IN ('available', 'cancelled')
            WHEN 'waiting_external' THEN NEW.state IN ('available', 'cancelled', 'completed', 'failed', 'retryable', 'running')
            ELSE false END)
    )
    EXECUTE FUNCTION towpath.refuse_step();
