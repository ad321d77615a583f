"""`megalaunch generate` and `evaluate`."""
