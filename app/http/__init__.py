"""The edge: strict JSON, problems, hot routes, OpenAPI, health."""
