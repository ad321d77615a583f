"""What goes wrong with a checkpoint, in a user's words."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or trusted. Under several ranks, every one raises the same."""
