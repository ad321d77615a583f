"""`megalaunch train`, `validate-config` and `watch`."""
