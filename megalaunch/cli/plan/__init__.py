"""`megalaunch plan` and its output."""
