"""Towpath: a durable job service over HTTP on PostgreSQL."""

__version__ = "0.1.0"
