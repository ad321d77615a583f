"""The checkpoint exceptions, whose messages are for users."""

from __future__ import annotations

from megalaunch.rundir.outcome import ExitCode


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or trusted. In a distributed call every rank raises the same error."""

    exit_code = ExitCode.CHECKPOINT
    """The exit code of a run that it ends."""


class StorageError(CheckpointError):
    """A failed write that may succeed later, once the storage has space or is writable again.

    Attributes:
        path: What was being written.
        reason: Why it failed, without advice for a run that ends.
        fix: What a user can do about it while the run waits, in the imperative.
    """

    path = reason = fix = ""  # values of an instance are set after it is made: ranks send exceptions to each other
