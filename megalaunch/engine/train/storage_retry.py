"""Repeat work of all ranks while the storage of the run directory fails, until the deadline or a request to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megalaunch.engine.checkpoint.coordination import coordination_group, gather_objects
from megalaunch.engine.checkpoint.errors import CheckpointError, StorageError
from megalaunch.engine.run_end import exit_code_of
from megalaunch.engine.train.run_logger import RunLogger, describe_wait
from megalaunch.rundir.storage_wait import StorageWait

T = TypeVar("T")
STORAGE = "waiting for storage"
"""The phase of ranks that wait for the storage of the run directory."""
_SLICE_SECONDS = 0.2  # a stop signal that arrives in a pause is noticed after so long


def retry_while_storage_fails(
    record: RunLogger,
    work: Callable[[], T],
    waiting: Callable[[], None],
    group: dist.ProcessGroup | None = None,
) -> T:
    """Run `work`; run it again from the beginning while it raises a StorageError. Collective.

    The ranks decide together after each failure: no rank waits in a collective for longer than a pause, so limits on
    collectives need not include the deadline.

    Args:
        record: Log writer of this rank; it knows the deadline, and the signal to stop.
        work: Collective work that raises a CheckpointError on all ranks or on none.
        waiting: Called several times a second in a pause.
        group: Process group of a save thread; None: that of the main threads.

    Raises:
        CheckpointError: The same on all ranks.
    """
    wait = record.storage_wait()
    while True:
        try:
            result = work()
        except StorageError as error:
            begins = not wait.has_begun
            wait.fail()
            _continue_together(record, wait, error, group)
            if begins:
                first = error
                record.storage_fails(Path(error.path), error.reason, error.fix, wait.seconds_left)
            _pause(wait, waiting)
            continue
        if wait.has_begun:
            record.storage_is_back(Path(first.path), first.reason, wait.succeed())
        return result


def _continue_together(
    record: RunLogger, wait: StorageWait, error: StorageError, group: dist.ProcessGroup | None
) -> None:
    """Raise the same CheckpointError on every rank if the wait is over on any."""
    mine = None
    if wait.is_over or record.problem is not None:
        stop = record.stop()
        mine = StorageError(f"{error}{describe_wait(wait, stop)}")
        mine.exit_code = CheckpointError.exit_code if stop is None else exit_code_of(stop)
    for answer in gather_objects(mine, group or coordination_group()):
        if answer is not None:
            record.waits_for_storage = False
            raise answer from error


def _pause(wait: StorageWait, waiting: Callable[[], None]) -> None:
    """Sleep until the next try; less if the wait is over, as after a request to stop."""
    while (left := wait.pause) > 0 and not wait.is_over:
        waiting()
        time.sleep(min(left, _SLICE_SECONDS))
