"""Convert the events of a run to a timeline: its launches, the phases of each, and what happened in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megalaunch.launch.display.event_messages import event_message
from megalaunch.launch.run_state import number
from megalaunch.rundir.jsonl import Record

STARTING = "starting"
"""From the launcher's start of the workers to their first phase: process start, imports."""
_ENDS_PHASE = ("worker_failed", "restart", "outcome")
_MARKS = {
    "checkpoint": "checkpoint",
    "worker_failed": "failure",
    "restart": "restart",
    "stop_requested": "stop",
    "early_stopping": "stop",
    "skipped_step": "warning",
    "bad_step": "warning",
    "metrics_gap": "warning",
    "overrides_changed": "warning",
    "zero_gradient": "warning",
    "expert_collapse": "warning",
    "straggler": "warning",
    "checkpoint_refused": "warning",
}


@dataclass(frozen=True)
class Phase:
    """A phase of a launch; `start` and `end` in seconds since 1970."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment: its kind (checkpoint, failure, restart, stop, warning) and a sentence."""

    time: float
    kind: str
    message: str


@dataclass
class Launch:
    """One launch of a run, restarts included; times in seconds since 1970."""

    start: float
    end: float
    overrides: tuple[str, ...] = ()
    phases: list[Phase] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    outcome: str = "no outcome was written"


def read_timeline(events: Iterable[Record]) -> list[Launch]:
    """Return the launches of a run in order; a phase that nothing ends lasts until the launch's last event."""
    launches: list[Launch] = []
    began: tuple[str, float] | None = None  # the current phase and its start
    for event in events:
        name, time = event.get("event"), number(event, "time")
        if name == "launch":
            if launches and began is not None:
                launches[-1].phases.append(Phase(*began, launches[-1].end))
            launches.append(Launch(time, time, tuple(map(str, event.get("overrides") or ()))))
            began = (STARTING, time)
            continue
        if not launches:
            continue  # the file does not begin with a launch: it was cut by hand
        launch = launches[-1]
        launch.end = max(launch.end, time)
        if name in ("phase", *_ENDS_PHASE):
            if began is not None:
                launch.phases.append(Phase(*began, time))
            began = {"phase": (str(event.get("phase")), time), "restart": (STARTING, time)}.get(str(name))
        if name in _MARKS:
            launch.marks.append(Mark(time, _MARKS[name], event_message(event) or str(name)))
        if name == "outcome":
            launch.outcome = str(event.get("reason"))
    if launches and began is not None:
        launches[-1].phases.append(Phase(*began, launches[-1].end))
    return launches


def phase_seconds(launches: Sequence[Launch]) -> list[tuple[str, float]]:
    """Return the time in each phase over all launches, the longest first."""
    seconds: dict[str, float] = {}
    for launch in launches:
        for phase in launch.phases:
            seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
    return sorted(seconds.items(), key=lambda item: -item[1])
