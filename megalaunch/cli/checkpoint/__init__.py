"""`megalaunch checkpoint` and `convert`."""
