"""The display where stdout is not a terminal: one line per log interval, and one per event."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from megalaunch.format.numbers import format_count, format_duration, format_flops, format_loss, format_memory
from megalaunch.launch.display.event_messages import event_message
from megalaunch.launch.run_state import RunState, number
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.metrics import is_task_evaluation, task_scores, validation_losses

STARTING_SILENCE = 9.0  # seconds; outside of steps there must be output within 10 s
TRAINING_SILENCE = 60.0
_BEFORE_STEPS = (
    "launch",
    "restart",
    "nodes_changed",
    "phase",
    "resumed",
    "metrics_cut",
    "metrics_gap",
    "checkpoint_refused",
)  # other events are printed after the new steps


class PlainDisplay:
    """Print lines to `stream`. A stream that is closed (pipe or terminal) ends the printing, not the run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._spoke = time.monotonic()
        self._gone = self._steps_seen = False

    def say(self, line: str) -> None:
        """Print one line now."""
        self._spoke = time.monotonic()
        if not self._gone:
            try:
                print(line, file=self._stream, flush=True)
            except (OSError, ValueError):
                self._gone = True

    def update(self, view: RunState) -> None:
        """Print the events, steps and validations since the last call."""
        for event in view.fresh_events:
            if event.get("event") == "restart":
                self._steps_seen = False
            if event.get("event") in _BEFORE_STEPS:
                self._say_event(event)
        interval = view.spec.logging.log_interval
        for record in view.fresh_metrics:
            step = int(record["step"])
            if "loss" not in record:
                self.say(evaluation_line(record))
            elif step % interval == 0 or step in (1, view.last_step):
                self.say(step_line(view, record))
        self._steps_seen = self._steps_seen or view.stepping
        for event in view.fresh_events:
            if event.get("event") not in _BEFORE_STEPS:
                self._say_event(event)
        self._break_silence(view)

    def _say_event(self, event: Record) -> None:
        # Between steps a phase is visible by its result: a validation loss, a checkpoint.
        if (line := event_message(event)) and not (self._steps_seen and event.get("event") == "phase"):
            self.say(line)

    def _break_silence(self, view: RunState) -> None:
        now = time.monotonic()
        if now - self._spoke >= (TRAINING_SILENCE if view.stepping else STARTING_SILENCE):
            doing = "training" if view.stepping else view.files or view.phase
            self.say(f"still {doing} (step {view.step}, {format_duration(view.elapsed)} since the launch)")

    def close(self) -> None:
        """Do nothing: there is no terminal state to restore."""


def evaluation_line(record: Record) -> str:
    """Return the line of a validation, or of an evaluation of lm-eval tasks."""
    if is_task_evaluation(record):
        scores = "  ".join(f"{name} {value:.4f}" for name, value in task_scores(record).items())
        return f"step {record['step']}  {scores}"
    shown = (
        f"{f'validation loss of {name}' if name else 'validation loss'} {format_loss(loss)}"
        for name, loss in validation_losses(record).items()
    )
    return f"step {record['step']}  {'  '.join(shown)}"


def step_line(view: RunState, record: Record) -> str:
    """Return the line of a step record."""
    width = len(str(view.last_step))
    parts = [
        f"step {int(record['step']):>{width}}/{view.last_step}",
        f"loss {format_loss(number(record, 'loss'))}",
        f"grad norm {number(record, 'grad_norm'):.3f}",
        f"lr {number(record, 'learning_rate'):.2e}",
        f"{format_count(number(record, 'tokens_per_second'))} tokens/s",
    ]
    if view.device_flops:
        parts.append(format_flops(view.device_flops))
    if view.utilization:
        parts.append(f"MFU {view.utilization:.1%}")
    parts.append(format_memory(number(record, "memory_bytes")))
    if view.seconds_left is not None:
        parts.append(f"{format_duration(view.seconds_left)} left")
    return "  ".join(parts)
