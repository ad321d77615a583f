"""Lock the directory of a run that starts; a restart waits for the lock of a launcher whose machine was lost."""

from __future__ import annotations

import os
import time

import typer

from megalaunch.launch.directory import RunDirectoryError, lock_run
from megalaunch.launch.lock import SILENT_SECONDS, RunLock, RunLocked
from megalaunch.rundir.environment import current_attempt
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.errors import fail
from megalaunch.runs.prepare_run import refuse_directory

_POLL_SECONDS = 0.5
_LOST_SECONDS = 3 * SILENT_SECONDS  # a file server keeps the lock of a lost client for its lease, usually 90 s


def lock_directory(directory: RunDirectory) -> RunLock:
    """Return the lock of a run directory. Ends the command with an error if it cannot be had.

    Node 0 of a restart may be on another machine than before. The lock of the launcher there outlives a machine that
    was lost, until its heartbeat counts as silent or the file server's lease is over.
    """
    deadline = time.monotonic() + (_LOST_SECONDS if current_attempt(os.environ) else 0.0)
    said = False
    while True:
        try:
            return lock_run(directory)
        except RunDirectoryError as error:
            refuse_directory(error)
        except RunLocked as error:
            if time.monotonic() >= deadline:
                fail(f"{error}\nfix:  wait for it or stop it there, or name another run.directory")
            if not said:
                typer.echo(f"{error}: this restart waits up to {_LOST_SECONDS:.0f} s, in case its machine was lost")
            said = True
        time.sleep(_POLL_SECONDS)
