DROP TABLE towpath.signing_keys, towpath.idempotency_keys, towpath.job_events, towpath.waits, towpath.jobs, towpath.queues CASCADE;
DROP FUNCTION towpath.refuse_step, towpath.uuid7, towpath.backoff_seconds, towpath.enqueue, towpath.enqueue_many,
    towpath.enqueue_checked, towpath.insert_jobs, towpath.replay_answers, towpath.request_digests, towpath.checked_job, towpath.checked_number;
