"""Webhooks that cannot carry a callback URL: they find their waits by a correlation key."""
