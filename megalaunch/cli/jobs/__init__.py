"""`megalaunch status`, `logs`, `stop` and `list`: runs that were submitted as jobs, and runs of this machine."""
