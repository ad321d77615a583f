"""The checkpoint exception, whose messages are for users."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or trusted. In a distributed call every rank raises the same error."""
