"""Collect traces of hung and aborted workers: Python stacks and last collectives on request, stacks of an abort.

Stacks go to a rank's log, its last collectives (PyTorch's flight recorder) to a file beside it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalaunch.launch.hang.rank_monitor import Rank
from megalaunch.process import cpu_seconds, expects, is_alive, send_signal
from megalaunch.rundir.collective_trace import (
    DUMP_STACKS_SIGNAL,
    DUMP_TRACE_SIGNAL,
    CollectiveTrace,
    frame_location,
    read_collective_trace,
)
from megalaunch.rundir.paths import RunDirectory

REPLY_SECONDS = 10.0  # after the newest reply: with more busy processes than cores each may be slow
BUSY_SECONDS = 2.0  # of CPU time, and at least as long, without a reply: native code holds the interpreter's lock
_SIGNALS = (DUMP_STACKS_SIGNAL, DUMP_TRACE_SIGNAL)

_TAIL_BYTES = 256 * 1024
_ABORTED = b"Fatal Python error: Aborted"  # faulthandler's heading
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MAIN = f"{os.sep}engine{os.sep}worker.py"  # the file of the outermost frame of every worker's main thread


@dataclass(frozen=True)
class _Awaited:
    """A rank whose trace is awaited, and the CPU time that it had used before the request."""

    rank: Rank
    cpu_seconds: float = 0.0

    def may_answer(self, waited: float) -> bool:
        process = self.rank.process
        if process is None:
            return True
        is_busy = waited >= BUSY_SECONDS and cpu_seconds(process) - self.cpu_seconds >= BUSY_SECONDS
        return is_alive(process) and not is_busy


def request_traces(
    ranks: Sequence[Rank], directory: RunDirectory, is_known: Callable[[], bool] = lambda: False
) -> dict[int, CollectiveTrace]:
    """Signal the ranks of this machine, and return the traces of all that answer in time, by rank.

    Those of other machines are signalled by their own launchers. An earlier request of the same attempt may have left
    traces: one of this machine counts if it was written after the request, one of another after the rank's last
    progress.

    A stopped process cannot answer, nor one that holds the interpreter's lock (GIL) in native code: a busy process is
    awaited for BUSY_SECONDS. A process without handlers for the two signals is left out: they would kill it.

    Args:
        is_known: ends the wait for traces once it is true, since another node has named the hung rank.
    """
    awaited: dict[int, _Awaited] = {}
    began, requested = time.time(), time.monotonic()
    for rank in ranks:
        if rank.process is None:
            awaited[rank.progress.rank] = _Awaited(rank)
        elif not rank.is_stopped and all(expects(rank.process, signal) for signal in _SIGNALS):
            awaited[rank.progress.rank] = _Awaited(rank, cpu_seconds(rank.process))
            for signal in _SIGNALS:
                send_signal(rank.process, signal)
    traces: dict[int, CollectiveTrace] = {}
    deadline = requested + REPLY_SECONDS
    while (now := time.monotonic()) < deadline and any(
        number not in traces and one.may_answer(now - requested) for number, one in awaited.items()
    ):
        if is_known():
            break
        time.sleep(0.05)
        for number, rank in ((number, one.rank) for number, one in awaited.items()):
            # The clocks of two machines may differ: a rank of another one has written both of these times itself.
            since = rank.progress.time if rank.process is None else began
            trace = read_collective_trace(directory.collective_trace(number), rank.progress.attempt, since)
            if trace is not None and number not in traces:
                traces[number] = trace
                deadline = time.monotonic() + REPLY_SECONDS
    return traces


def abort_location(log: Path) -> tuple[str, bool]:
    """Return (file and line of the main thread when it aborted, True if in a collective); ("", False) without a stack.

    Args:
        log: the rank's log; its last 256 KiB are searched for faulthandler's newest dump.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            _, found, dump = file.read().rpartition(_ABORTED)
    except OSError:
        return "", False
    stacks = _THREAD.split(dump.decode(errors="replace"))[1:] if found else []
    for stack in reversed(stacks):
        lines = [(path, int(number), function) for path, number, function in _LINE.findall(stack)]
        if any(_MAIN in path for path, _, _ in lines):
            return frame_location(lines)
    return "", False
