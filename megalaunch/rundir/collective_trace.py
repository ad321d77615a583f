"""What a worker tells when it hangs or crashes: its last collectives, and where its main thread is."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megalaunch.rundir.atomic_file import temporary_path
from megalaunch.rundir.files import create_file

DUMP_STACKS_SIGNAL = signal.SIGUSR2
"""A worker writes the stacks of its threads into its log, whatever they are stuck in."""
DUMP_TRACE_SIGNAL = signal.SIGUSR1
"""A worker writes its trace."""

StackLine = tuple[str, int, str]
"""One line of a stack: file, line number, function."""

_NO_CALLERS = (f"{os.sep}torch{os.sep}", "torchinductor")  # the latter: what torch.compile has written
_PYTHON = str(Path(os.__file__).parent)


@dataclass(frozen=True)
class Collective:
    """One collective of a group: the members number them alike. `what` says operation and shapes."""

    number: int
    what: str
    waiting: bool


@dataclass(frozen=True)
class GroupTrace:
    """The newest collectives of one group, oldest first; `seen` counts all that are remembered by `what`."""

    name: str
    ranks: tuple[int, ...]
    last: tuple[Collective, ...]
    seen: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveTrace:
    """One rank's, told at `time` (since 1970); `location` is the innermost line that its main thread is in, torch's and
    Python's own left out, `in_collective` whether it is in a call of torch.distributed there.
    """

    attempt: int
    time: float
    location: str
    in_collective: bool
    groups: tuple[GroupTrace, ...]

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for others."""
        return self.in_collective or any(one.waiting for group in self.groups for one in group.last)


def frame_location(stack: Iterable[StackLine]) -> tuple[str, bool]:
    """The innermost line that is neither torch's nor Python's own, and whether torch.distributed is further in."""
    inside = False
    for file, line, function in stack:
        of_python = file.startswith((_PYTHON, "<")) and "site-packages" not in file
        if not of_python and not any(part in file for part in _NO_CALLERS):
            ours = f"{os.sep}megalaunch{os.sep}"
            shown = file.rpartition(ours)[2] if ours in file else Path(file).name
            return f"{shown}:{line} {function}", inside
        inside = inside or f"{os.sep}torch{os.sep}distributed{os.sep}" in file
    return "", inside


def write_collective_trace(path: Path, trace: CollectiveTrace) -> None:
    """Write by an atomic rename. Raises OSError."""
    unfinished = temporary_path(path)  # not synced: it is read while the machine that wrote it still runs
    with os.fdopen(create_file(unfinished), "w", encoding="utf-8") as file:
        json.dump(asdict(trace), file)
    unfinished.replace(path)


def read_collective_trace(path: Path, attempt: int, since: float = 0.0) -> CollectiveTrace | None:
    """The trace that a worker of this attempt left (not before `since`), or None."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        groups = tuple(
            GroupTrace(
                group["name"],
                tuple(group["ranks"]),
                tuple(Collective(**one) for one in group["last"]),
                group["seen"],
            )
            for group in data["groups"]
        )
        trace = CollectiveTrace(data["attempt"], data["time"], data["location"], data["in_collective"], groups)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return trace if trace.attempt == attempt and trace.time >= since else None
