"""Jobs that gave up."""
