"""Jobs that wait for the outside."""
