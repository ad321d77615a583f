"""`megalaunch sweep` and its output."""
