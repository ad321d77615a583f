"""What a run looks like right now, gathered from its metrics.jsonl and events.jsonl; both displays draw this."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean

from megalaunch.config.schema import RunSpec
from megalaunch.launch.follow import LineFollower
from megalaunch.rundir.lines import Record
from megalaunch.rundir.paths import RunDirectory

_RECENT_STEPS = 50


@dataclass(frozen=True)
class Scale:
    """What turns step times into FLOP/s: per step over all devices, devices, and dense peak of one (None: unknown)."""

    step_flops: int
    devices: int
    peak_flops: float | None


class RunView:
    """Refreshed by `refresh`; `fresh_*` hold what came since the last refresh, `stepping` is true while steps come in.

    What the files hold at the beginning is history: it is in the figures, but not fresh. `attach` takes the phase
    from it too, for a launch that goes on elsewhere.
    """

    def __init__(self, spec: RunSpec, directory: RunDirectory, scale: Scale, attach: bool = False) -> None:
        self.spec, self.directory, self.scale = spec, directory, scale
        self._metrics = LineFollower(directory.metrics)
        self._events = LineFollower(directory.events)
        self._clear()
        self._known_step = self._known_validation = 0
        self.phase, self.stepping = "starting", False
        self.refresh()
        self.fresh_steps, self.fresh_validations, self.fresh_events = [], [], []
        if not attach:
            self.phase, self.stepping = "starting", False

    def _clear(self) -> None:
        self.latest: Record | None = None
        self.validation: Record | None = None
        self.losses: deque[float] = deque(maxlen=200)
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def refresh(self) -> None:
        """Read what was appended; a rewritten metrics file replaces what was known, its cut steps come anew."""
        records, rewritten = self._metrics.read_new()
        if rewritten:
            self._clear()
        steps = [record for record in records if "loss" in record and "step" in record]
        validations = [record for record in records if "validation_loss" in record and "step" in record]
        for record in steps:
            self.latest = record
            self.losses.append(number(record, "loss"))
            self._step_seconds.append(number(record, "step_seconds"))
        self.validation = validations[-1] if validations else self.validation
        self.fresh_steps = [record for record in steps if number(record, "step") > self._known_step]
        self.fresh_validations = [v for v in validations if number(v, "step") > self._known_validation]
        self._known_step, self._known_validation = self.step, int(number(self.validation or {"step": 0}, "step"))
        self.fresh_events, _ = self._events.read_new()
        for event in self.fresh_events:
            if event.get("event") in ("phase", "restart"):
                self.phase, self.stepping = str(event.get("phase", "starting again")), False
        if self.fresh_steps:
            self.stepping = True

    @property
    def step(self) -> int:
        """The last step that is in the metrics, 0 before the first."""
        return int(number(self.latest, "step")) if self.latest else 0

    @property
    def last_step(self) -> int:
        """Where this launch ends."""
        train = self.spec.train
        return min(train.steps, train.stop_at or train.steps)

    @property
    def seconds_left(self) -> float | None:
        """Steps to go times the mean of the recent ones; None before the first step."""
        recent = [seconds for seconds in self._step_seconds if seconds > 0]
        return fmean(recent) * max(0, self.last_step - self.step) if recent else None

    @property
    def device_flops(self) -> float | None:
        """FLOP/s of one device over the recent steps; None before the first step."""
        recent = [seconds for seconds in self._step_seconds if seconds > 0]
        return self.scale.step_flops / fmean(recent) / self.scale.devices if recent else None

    @property
    def utilization(self) -> float | None:
        """MFU, 0 to 1; None where the device's peak is not known."""
        rate = self.device_flops
        return rate / self.scale.peak_flops if rate and self.scale.peak_flops else None


def number(record: Record | None, key: str) -> float:
    """A number of a record, or NaN where it has none."""
    value = record.get(key) if record else None
    return float(value) if isinstance(value, (int, float)) else float("nan")
