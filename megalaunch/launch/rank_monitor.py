"""The ranks of this machine as their progress files and /proc show them: where each is, and whether it lives."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.launch.process import Process, find_process, is_alive, is_stopped, is_traced, return_code
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress, read_progress

STEPPING = "step"  # the phase in which workers compute optimizer steps
# The phases from a worker's start to its first step.
STARTING = frozenset(
    ("starting", "loading torch", "joining", "building", "looking for checkpoints", "checking checkpoints", "loading")
)


@dataclass
class Rank:
    """One worker of an attempt."""

    progress: Progress
    process: Process | None
    ended: bool = False
    return_code: int | None = None
    outlived_peer: bool = False  # it still ran when others had died, and the launcher ended it

    @property
    def is_stopped(self) -> bool:
        """Whether its process is held by a stop signal or a debugger."""
        return self.process is not None and is_stopped(self.process)

    @property
    def is_traced(self) -> bool:
        """Whether a debugger holds its process."""
        return self.process is not None and is_traced(self.process)

    @property
    def label(self) -> str:
        """`rank 1 (dp1)`."""
        return rank_label(self.progress.rank, self.progress.coordinates)


def rank_label(rank: int, coordinates: str) -> str:
    """`rank 1 (dp1)`, or `rank 0` where the coordinates are not known yet."""
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"


class RankMonitor:
    """The ranks of one attempt that have reported; refreshed by `look`."""

    def __init__(self, directory: RunDirectory, world: int, attempt: int) -> None:
        self._directory, self._world, self._attempt = directory, world, attempt
        self.known: dict[int, Rank] = {}

    def refresh(self) -> bool:
        """Read every rank's position; True when any has reported since the last look."""
        moved = False
        for number in range(self._world):
            record = read_progress(self._directory.progress(number))
            if record is not None and record.attempt == self._attempt:
                moved = self._place(record) or moved
        for rank in self.known.values():
            self._check(rank)
        return moved

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
    def are_starting(self) -> bool:
        """Whether any of them is still on its way to its first step."""
        return len(self.known) < self._world or any(rank.progress.phase in STARTING for rank in self.alive)

    @property
    def alive(self) -> list[Rank]:
        """Ranks whose process runs."""
        return [rank for rank in self.known.values() if not rank.ended]

    @property
    def ended(self) -> list[Rank]:
        """Ranks whose process is gone, or is a zombie."""
        return [rank for rank in self.known.values() if rank.ended]

    @property
    def step(self) -> int:
        """The step that the ranks are at, 0 before the first."""
        return max((rank.progress.step for rank in self.known.values()), default=0)

    def slowest(self) -> Rank | None:
        """Who holds the others up: a stopped process, else the lowest step, else who has been silent longest."""

        def order(rank: Rank) -> tuple[bool, int, float]:
            return (not rank.is_stopped, rank.progress.step, rank.progress.time)

        return min(self.alive, key=order, default=None)
