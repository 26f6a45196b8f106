"""Connections, the schema, migrations, notifications, group commit."""
