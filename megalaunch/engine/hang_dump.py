"""Dump the state of a stuck worker: the stacks of its threads, and its last collectives from torch's flight recorder.

launch/hang/diagnosis.py asks for the dumps of all ranks, and diagnoses the hang from them.

Imports only the standard library, since it is installed before torch is imported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalaunch.rundir.collective_trace import (
    DUMP_STACKS_SIGNAL,
    DUMP_TRACE_SIGNAL,
    Collective,
    CollectiveTrace,
    GroupTrace,
    StackLine,
    frame_location,
    write_collective_trace,
)

_FLIGHT_RECORDER_ENTRIES = 1000  # flight recorder entries, over all groups: a few steps of a large model
_MAX_REPORTED = 20  # newest collectives of each group in a trace
CHECKPOINT_GROUP = "checkpoint"  # of the asynchronous save thread; not reported, as it interleaves with training's


class HangDump:
    """Signal handlers that dump a worker's state while its main thread is stuck.

    DUMP_STACKS_SIGNAL writes the stacks of all threads to the log, in C code that works whoever holds the GIL.
    DUMP_TRACE_SIGNAL writes the collective trace, from a separate thread.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        self._main = threading.main_thread().ident

    def install(self) -> None:
        """Install the signal handlers. Call before importing torch: it sets TORCH_FR_BUFFER_SIZE."""
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_FLIGHT_RECORDER_ENTRIES))
        faulthandler.enable()
        faulthandler.register(DUMP_STACKS_SIGNAL, all_threads=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_TRACE_SIGNAL})  # new threads inherit it; `_answer` waits for it
        threading.Thread(target=self._answer, name="hang_dump", daemon=True).start()

    def _answer(self) -> None:
        while True:
            signal.sigwait({DUMP_TRACE_SIGNAL})
            self.dump()

    def dump(self, error: BaseException | None = None) -> None:
        """Write the current collective trace; unknown parts are left out, and errors in writing it are ignored.

        Args:
            error: The exception that ends this rank: the trace's location is where it was raised. None: the current
                line of the main thread.
        """
        where, inside = frame_location(self._stack() if error is None else _format_stack(error))
        with contextlib.suppress(OSError):
            write_collective_trace(self._path, CollectiveTrace(self._attempt, time.time(), where, inside, _groups()))

    def _stack(self) -> Iterator[StackLine]:
        """Yield the stack of the main thread, innermost frame first."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            frame = frame.f_back


def _format_stack(error: BaseException) -> list[StackLine]:
    """Return the stack of an exception's traceback, innermost frame first."""
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return [(code.co_filename, line, code.co_name) for code, line in reversed(lines)]


def _groups() -> tuple[GroupTrace, ...]:
    """Read the collectives of each group from torch's flight recorder; none if this torch cannot dump it as JSON."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    names = _ranks_of_groups()
    if c10d is None or not names or not hasattr(c10d, "_dump_fr_trace_json"):
        return ()
    by_group: dict[str, list[dict[str, Any]]] = {}
    titles = {}
    for entry in json.loads(c10d._dump_fr_trace_json(True, False)).get("entries", []):
        name, title = entry["process_group"]
        if not entry["is_p2p"] and name in names and title != CHECKPOINT_GROUP:
            by_group.setdefault(name, []).append(entry)
            titles[name] = title.removeprefix("mesh_").replace("default_pg", "world")
    return tuple(_group(titles[name], names[name], entries) for name, entries in by_group.items())


def _group(title: str, ranks: tuple[int, ...], entries: list[dict[str, Any]]) -> GroupTrace:
    seen = Counter(_describe_collective(entry) for entry in entries)
    last = tuple(
        Collective(entry["collective_seq_id"], _describe_collective(entry), not entry["retired"])
        for entry in entries[-_MAX_REPORTED:]
    )
    return GroupTrace(title, ranks, last, dict(seen))


def _describe_collective(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].partition(":")[2]
    # Only the source of a scatter has inputs: with them the ranks of one scatter would seem to call different ones.
    shapes = "" if operation == "scatter" else ", ".join(str(shape) for shape in entry["input_sizes"])
    return f"{operation} of {shapes}" if shapes else operation


def _ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of every process group, by the group's name."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None or not module.is_initialized():
        return {}
    return {name: tuple(module.get_process_group_ranks(group)) for group, name in module._world.pg_names.items()}
