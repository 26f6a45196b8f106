"""The job as producers and operators see it, and the only code that moves one."""
