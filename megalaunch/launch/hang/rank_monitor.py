"""Monitor ranks by their progress files and, on this machine, by /proc: the phase and step of each, and if it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megalaunch.process import Process, find_process, is_alive, is_stopped, is_traced, return_code
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress, read_progress
from megalaunch.rundir.worker_failure import rank_label

STEPPING = "step"  # the phase in which workers compute optimizer steps
_JOINING = frozenset(("starting", "loading torch", "joining"))  # until the ranks are connected
# The phases from a worker's start to its first step.
STARTING = _JOINING | {"building", "looking for checkpoints", "checking checkpoints", "loading"}


@dataclass
class Rank:
    """One worker of an attempt: its newest progress record and its process; None: gone, or on another machine."""

    progress: Progress
    process: Process | None
    ended: bool = False
    return_code: int | None = None
    outlived_peer: bool = False  # it still ran after a peer had died, and the launcher killed it

    @property
    def is_stopped(self) -> bool:
        """True if the rank's process is stopped by a signal or a debugger."""
        return self.process is not None and is_stopped(self.process)

    @property
    def is_traced(self) -> bool:
        """True if a debugger holds the rank's process."""
        return self.process is not None and is_traced(self.process)

    @property
    def label(self) -> str:
        """`rank 1 (dp1)`."""
        return rank_label(self.progress.rank, self.progress.coordinates)


class RankMonitor:
    """The ranks of one attempt that have written a progress record; `refresh` updates those of this machine.

    Args:
        local: the ranks of this machine; None: all.
    """

    def __init__(self, directory: RunDirectory, world: int, attempt: int, local: range | None = None) -> None:
        self._directory, self._world, self.attempt = directory, world, attempt
        self._local = range(world) if local is None else local
        self.known: dict[int, Rank] = {}

    def refresh(self) -> bool:
        """Read the progress of the ranks of this machine; True when any has progressed since the last call."""
        moved = False
        for record in self._records(self._local):
            moved = self._place(record) or moved
        for rank in self.local:
            self._check(rank)
        return moved

    def look_at_others(self) -> bool:
        """Read the progress of the ranks of other machines; True when any has progressed since the last call.

        A rank that is seen for the first time has not progressed. `forget_others` begins anew.
        """
        moved = False
        for record in self._records(number for number in range(self._world) if number not in self._local):
            before = self.known.get(record.rank)
            moved = moved or (before is not None and before.progress.ticks != record.ticks)
            self.known[record.rank] = Rank(record, None)
        return moved

    def forget_others(self) -> None:
        """Forget the ranks of other machines, whose records grow old."""
        self.known = {number: rank for number, rank in self.known.items() if number in self._local}

    @property
    def local(self) -> list[Rank]:
        """The known ranks of this machine, in their order."""
        return [rank for number, rank in sorted(self.known.items()) if number in self._local]

    def _records(self, numbers: Iterable[int]) -> Iterable[Progress]:
        for number in numbers:
            record = read_progress(self._directory.progress(number))
            if record is not None and record.attempt == self.attempt:
                yield record

    def _place(self, record: Progress) -> bool:
        rank = self.known.get(record.rank)
        if rank is None or rank.progress.pid != record.pid:
            self.known[record.rank] = Rank(record, find_process(record.pid))
            return True
        moved = rank.progress.ticks != record.ticks
        rank.progress = record
        return moved

    def _check(self, rank: Rank) -> None:
        if rank.ended:
            return
        if rank.process is None or not is_alive(rank.process):
            rank.ended = True
            rank.return_code = return_code(rank.process) if rank.process else None

    @property
    def are_joining(self) -> bool:
        """True while any rank of this machine, or any other that is known, is not connected to the others."""
        return len(self.local) < len(self._local) or any(rank.progress.phase in _JOINING for rank in self.alive)

    @property
    def are_starting(self) -> bool:
        """True while any rank of this machine, or any other that is known, has not reached its first step."""
        return len(self.local) < len(self._local) or any(rank.progress.phase in STARTING for rank in self.alive)

    @property
    def alive(self) -> list[Rank]:
        """Ranks whose process runs, as far as this machine knows."""
        return [rank for rank in self.known.values() if not rank.ended]

    @property
    def ended(self) -> list[Rank]:
        """Ranks whose process is gone, or is a zombie."""
        return [rank for rank in self.known.values() if rank.ended]

    @property
    def step(self) -> int:
        """The highest step of any rank, 0 before the first."""
        return max((rank.progress.step for rank in self.known.values()), default=0)

    def slowest(self) -> Rank | None:
        """Return the rank that probably blocks the others.

        A stopped process comes first, then the lowest step, then the longest time without progress.
        """

        def order(rank: Rank) -> tuple[bool, int, float]:
            return (not rank.is_stopped, rank.progress.step, rank.progress.time)

        return min(self.alive, key=order, default=None)
