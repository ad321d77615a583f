"""The current state of a run, read from metrics.jsonl and events.jsonl; both displays draw it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from statistics import fmean

from megalaunch.format.numbers import format_bytes
from megalaunch.plan.batch import mean_batch_share
from megalaunch.plan.flops import step_flops
from megalaunch.plan.world import resolved_world_size
from megalaunch.platform.chips import CHIPS
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.metrics import is_task_evaluation, is_validation
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.tail import JsonlTail
from megalaunch.schema import RunSpec

_RECENT_STEPS = 50
_ENDS_WORK = ("phase", "checkpoint", "checkpoint_refused", "resumed", "restart", "outcome")
_PACE_STEPS = 20  # with fewer the wall clock is unreliable


@dataclass(frozen=True)
class ThroughputBasis:
    """Converts step times to FLOP/s: FLOPs of a step over all devices, devices, dense peak of one (None: unknown)."""

    step_flops: int
    devices: int
    peak_flops: float | None


def throughput_basis(spec: RunSpec) -> ThroughputBasis:
    """Return the throughput basis of a resolved spec."""
    chip = CHIPS.get(spec.platform.chip)
    peak = chip.peak_flops.get(spec.precision.compute_dtype) if chip else None
    return ThroughputBasis(step_flops(spec), resolved_world_size(spec.cluster), peak)


class RunState:
    """The state of a run, updated by `refresh`. `fresh_*` hold the records since the last refresh.

    `stepping` is true while steps arrive, `ending` from a stop request on; launcher and workers both record the
    request, and only the first record is fresh. Records present at construction are history: they count in the figures,
    but are not fresh. With `attach` the phase is taken from the history too, for a launch supervised by another
    process.
    """

    def __init__(self, spec: RunSpec, directory: RunDirectory, scale: ThroughputBasis, attach: bool = False) -> None:
        self.spec, self.directory, self.scale = spec, directory, scale
        self._metrics = JsonlTail(directory.metrics)
        self._events = JsonlTail(directory.events)
        self._pace_from: tuple[float, int] | None = None
        self._pace_to: tuple[float, int] | None = None
        self._created = time.time()
        self._launched_at: float | None = None
        self._clear()
        self._known = [0, 0, 0]
        self.phase, self.stepping, self.ending = "starting", False, False
        self._files: Record | None = None  # the newest progress event of a long file operation
        self.refresh()
        self.fresh_metrics: list[Record] = []
        self.fresh_events: list[Record] = []
        self._pace_from = None  # the history was read at once, so it gives no pace
        if not attach:
            self.phase, self.stepping, self.ending, self._files = "starting", False, False, None
            self._launched_at = None

    def _clear(self) -> None:
        self.latest: Record | None = None
        self.validation: Record | None = None
        self.tasks: Record | None = None
        self.losses: deque[float] = deque(maxlen=200)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._pace_from = None

    def refresh(self) -> None:
        """Read appended records; a rewritten metrics file replaces all records, its truncated steps arrive again."""
        records, rewritten = self._metrics.read_new()
        records = [record for record in records if "step" in record and _kind(record) is not None]
        known = self._known
        if rewritten:
            self._clear()
        for record in records:
            self._take(record)
        newest = (self.latest, self.validation, self.tasks)
        self._known = [int(number(record, "step")) if record else 0 for record in newest]
        self.fresh_metrics = [record for record in records if number(record, "step") > known[_kind(record) or 0]]
        events, _ = self._events.read_new()
        self.fresh_events = []
        for event in events:
            if event.get("event") == "stop_requested" and self.ending:
                continue  # of the other one of launcher and workers
            self._take_event(event)
            self.fresh_events.append(event)
        if any(_is_step(record) for record in self.fresh_metrics):
            self._pace_to = (time.monotonic(), self.step)
            self._pace_from = self._pace_from or self._pace_to
            self.stepping = True

    def _take_event(self, event: Record) -> None:
        kind = event.get("event")
        if kind == "launch":
            self._launched_at, self.ending = number(event, "time"), False
            workers = event.get("workers")
            if isinstance(workers, int) and workers != self.scale.devices:  # a restart on another number of nodes
                self.scale = replace(self.scale, devices=workers)
                self._step_seconds.clear()
        elif kind == "stop_requested":
            self.ending = True
        elif kind == "progress":
            self._files = event
        if kind in _ENDS_WORK:
            self._files = None
        if kind in ("phase", "restart"):
            self.phase, self.stepping = str(event.get("phase", "starting again")), False

    def _take(self, record: Record) -> None:
        if _is_step(record):
            self.latest = record
            self.losses.append(number(record, "loss"))
            self._step_seconds.append(number(record, "step_seconds"))
        elif is_validation(record):
            self.validation = record
        else:
            self.tasks = record

    @property
    def step(self) -> int:
        """The last step in the metrics, 0 before the first."""
        return int(number(self.latest, "step")) if self.latest else 0

    @property
    def last_step(self) -> int:
        """The step at which this launch ends."""
        train = self.spec.train
        return min(train.steps, train.exit_at_step or train.steps)

    @property
    def elapsed(self) -> float:
        """Seconds since the launch, the same for every process that reads the files."""
        since = self._created if self._launched_at is None else self._launched_at
        return max(0.0, time.time() - since)

    @property
    def files(self) -> str | None:
        """The long file operation in progress: `saving step 20: 45% of 84.2 GB`."""
        if self._files is None:
            return None
        done, total, step = (number(self._files, key) for key in ("done", "total", "step"))
        which = f" step {step:.0f}" if step > 0 else ""
        return f"{self._files.get('phase')}{which}: {done / max(1.0, total):.0%} of {format_bytes(total)}"

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the last step, at the recent pace, validations and checkpoints included.

        None before the first step, and after a stop request: the pace of steps does not predict the time to save.
        """
        if self._mean_step is None or self.ending:
            return None
        pace = self._mean_step
        if self._pace_from is not None and self._pace_to is not None:
            (began, first), (ended, last) = self._pace_from, self._pace_to
            if last - first >= _PACE_STEPS:
                pace = max(pace, (ended - began) / (last - first))
        left = mean_batch_share(self.spec, self.step + 1, self.last_step) / self._recent_share
        return pace * left * max(0, self.last_step - self.step)

    @property
    def _recent_share(self) -> float:
        """Mean batch size of the recent steps during a batch size rampup, as a share of the final one."""
        return mean_batch_share(self.spec, max(1, self.step - len(self._step_seconds) + 1), self.step)

    @property
    def _mean_step(self) -> float | None:
        recent = [seconds for seconds in self._step_seconds if seconds > 0]
        return fmean(recent) if recent else None

    @property
    def device_flops(self) -> float | None:
        """FLOP/s of one device over the recent steps; None before the first step."""
        seconds = self._mean_step
        if seconds is None:
            return None
        return self.scale.step_flops * self._recent_share / seconds / self.scale.devices

    @property
    def utilization(self) -> float | None:
        """MFU, 0 to 1; None where the device's peak is not known."""
        rate = self.device_flops
        return rate / self.scale.peak_flops if rate and self.scale.peak_flops else None


def number(record: Record | None, key: str) -> float:
    """Return a number of a record, or NaN where it has none."""
    value = record.get(key) if record else None
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _is_step(record: Record) -> bool:
    return "loss" in record


def _kind(record: Record) -> int | None:
    """Return 0 for a step, 1 for a validation, 2 for an evaluation of tasks; None for a line of another version."""
    kinds = (_is_step, is_validation, is_task_evaluation)
    return next((number for number, is_kind in enumerate(kinds) if is_kind(record)), None)
