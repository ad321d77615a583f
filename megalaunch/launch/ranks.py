"""The ranks of this machine as their progress files and /proc show them: where each is, and whether it lives."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.launch.process import Process, find_process, is_alive, is_stopped, return_code
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress, read_progress

STEPPING = "step"  # the phase in which workers compute optimizer steps


@dataclass
class Rank:
    """One worker of the current attempt. `moved` is the launcher's monotonic time of its last report."""

    progress: Progress
    process: Process | None
    moved: float
    ended: bool = False
    return_code: int | None = None
    held_on: bool = False  # it still ran when others had died, and the launcher ended it

    @property
    def is_stopped(self) -> bool:
        """Whether its process is held by a stop signal or a debugger."""
        return self.process is not None and is_stopped(self.process)

    @property
    def label(self) -> str:
        """`rank 1 (dp1)`."""
        return rank_label(self.progress.rank, self.progress.coordinates)


def rank_label(rank: int, coordinates: str) -> str:
    """`rank 1 (dp1)`, or `rank 0` where the coordinates are not known yet."""
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"


class Ranks:
    """Refreshed by `look`; holds the ranks of the newest attempt that has reported.

    `last_move` is when any of them reported last; `stepping` turns true with the attempt's first step.
    """

    def __init__(self, directory: RunDirectory, world: int, now: float) -> None:
        self._directory = directory
        self._world = world
        self.attempt = 0
        self.known: dict[int, Rank] = {}
        self.retired: dict[int, Rank] = {}
        self.last_move = now
        self.stepping = False

    def look(self, now: float) -> bool:
        """Read every rank's position; True when a new attempt has begun, which retires the ranks of the old one."""
        seen = [record for rank in range(self._world) if (record := read_progress(self._directory.progress(rank)))]
        newest = max((record.attempt for record in seen), default=self.attempt)
        renewed = newest > self.attempt
        if renewed:
            for rank in self.known.values():
                self._check(rank)
            self.attempt, self.retired, self.known = newest, self.known, {}
            self.last_move, self.stepping = now, False
        for record in seen:
            if record.attempt == self.attempt:
                self._place(record, now)
        for rank in self.known.values():
            self._check(rank)
        return renewed

    def _place(self, record: Progress, now: float) -> None:
        rank = self.known.get(record.rank)
        if rank is None or rank.progress.pid != record.pid:
            self.known[record.rank] = Rank(record, find_process(record.pid), now)
        elif rank.progress.ticks == record.ticks:
            return
        else:
            rank.progress, rank.moved = record, now
        self.last_move = now
        self.stepping = self.stepping or record.phase == STEPPING

    def _check(self, rank: Rank) -> None:
        if rank.ended:
            return
        if rank.process is None or not is_alive(rank.process):
            rank.ended = True
            rank.return_code = return_code(rank.process) if rank.process else None

    def restart_clock(self, now: float) -> None:
        """Count time without progress from now: the ranks are killed, and new ones have to start."""
        self.last_move, self.stepping = now, False

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

    def furthest_behind(self) -> Rank | None:
        """Who holds the others up: a stopped process, else the lowest step, else who has been silent longest."""

        def order(rank: Rank) -> tuple[bool, int, float]:
            return (not rank.is_stopped, rank.progress.step, rank.progress.time)

        return min(self.alive, key=order, default=None)
