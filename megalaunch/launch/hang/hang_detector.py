"""Hang detection: measure how long no rank has made progress, and the time limit for the phase that they are in."""

from __future__ import annotations

from collections import deque
from statistics import median

from megalaunch.launch.hang.rank_monitor import STEPPING, RankMonitor
from megalaunch.schema import RunSpec

STEP_SECONDS = 12.0  # minimum time limit of a step: with the wait for traces a hang is known within 15 s
STEP_MEDIANS = 10
_KNOWN_STEPS = 5  # with fewer the median is unreliable: first steps compile, allocate and connect
_LONGEST_GAP = 2.0
_MIN_SILENCE_SECONDS = 1.0  # seconds; no limit is shorter


class HangDetector:
    """Time since any rank made progress (`silent`, in seconds), compared to the limit of the current phase.

    A gap between two polls counts for at most 2 s, so time in which this process itself was suspended does not count: a
    scheduler that suspends a job stops the launcher together with its workers.
    """

    def __init__(self, spec: RunSpec, now: float) -> None:
        self._launcher, self._compiled = spec.launcher, spec.train.compile
        self._looked, self.silent = now, 0.0
        self._seconds_per_step: deque[float] = deque(maxlen=100)  # means, each of the steps between two polls
        self._measured_steps = 0  # far more than means where steps are shorter than the time between two polls
        self._last: tuple[int, float] | None = None  # step and time of the lowest rank's last report

    def poll(self, now: float, ranks: RankMonitor, moved: bool) -> None:
        """Advance to `now`, and record step times; `moved` says whether any rank has reported since the last poll."""
        gap, self._looked = now - self._looked, now
        self.silent = 0.0 if moved else self.silent + min(gap, _LONGEST_GAP)
        local = ranks.local  # of one machine, whose clock the times are of
        if not local or local[0].progress.phase != STEPPING:
            return
        step, time = local[0].progress.step, local[0].progress.time
        if self._last is not None and step > self._last[0]:
            steps = step - self._last[0]
            self._seconds_per_step.append((time - self._last[1]) / steps)
            self._measured_steps += steps
        if self._last is None or step != self._last[0]:
            self._last = (step, time)

    def is_hung(self, ranks: RankMonitor) -> bool:
        """Return whether the ranks have made no progress for longer than `limit`."""
        return self.silent > _MIN_SILENCE_SECONDS and self.silent > self.limit(ranks)

    def limit(self, ranks: RankMonitor) -> float:
        """Return the seconds without progress that the current phase may take.

        With a stopped rank, and within steps: step_timeout if given, else max(STEP_SECONDS, STEP_MEDIANS x median step
        time), at most hang_timeout. While ranks start: the larger of start_timeout and hang_timeout. In all other cases
        hang_timeout: outside of steps, before enough step times are known, while a debugger holds a rank, and with
        train.compile, since a new shape may compile the layers again. A stopped rank does not compile or start: its
        limit does not wait for step times.
        """
        hang_timeout, alive = self._launcher.hang_timeout, ranks.alive
        if any(rank.is_traced for rank in alive):
            return max(self._launcher.start_timeout, hang_timeout) if ranks.are_starting else hang_timeout
        is_stopped = any(rank.is_stopped for rank in alive)
        if not is_stopped:
            if ranks.are_starting:
                return max(self._launcher.start_timeout, hang_timeout)
            if not all(rank.progress.phase == STEPPING for rank in alive):
                return hang_timeout
        if self._launcher.step_timeout is not None:
            return min(hang_timeout, self._launcher.step_timeout)
        are_known = self._measured_steps >= _KNOWN_STEPS and not self._compiled
        if not are_known and not is_stopped:
            return hang_timeout
        usual = median(self._seconds_per_step) if are_known else 0.0
        return min(hang_timeout, max(STEP_SECONDS, STEP_MEDIANS * usual))
