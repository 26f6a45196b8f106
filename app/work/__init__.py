"""The worker's protocol: claim, heartbeat, settle."""
