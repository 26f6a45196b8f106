"""Senders' secrets: named, kept encrypted, written and never read."""
