"""Queues: defaults, pause, retention."""
