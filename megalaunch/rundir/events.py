"""The events of a run: launcher and workers append to `events.jsonl` through `record_event`."""

from __future__ import annotations

import time
from typing import Any, Literal

from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.paths import RunDirectory

EventName = Literal[
    "launch",  # launcher: overrides, workers, command
    "phase",  # worker rank 0: phase, elapsed_seconds
    "attention",  # worker rank 0: backend (model.attention_backend), kernel (the one that it means here, and why)
    "override",  # worker rank 0, one an override of another package: operator, implementation, vendor
    "resumed",  # worker rank 0: step, checkpoint
    "metrics_cut",  # worker rank 0: after_step, lines, last_step
    "metrics_gap",  # worker rank 0: until_step, missing, first, last (steps without a line)
    "checkpoint",  # worker rank 0: step, path, seconds, waited_seconds (that training was blocked)
    "progress",  # worker rank 0, during long file work: phase, step, done, total (bytes of this rank)
    "checkpoint_refused",  # worker rank 0: path, reason
    "zero_gradient",  # worker rank 0, at the first step of a row: step, limit (such steps that end the run; 0: none)
    "skipped_step",  # worker rank 0: step, loss_scale (in fp16), grad_norm (null if the gradients overflowed fp16)
    "bad_step",  # worker rank 0: step, reason, first (batch left out), rewound_to (step; null: no rewind), count, limit
    "expert_collapse",  # worker rank 0: step, layer, share (of the layer's tokens, at one expert), steps (in a row)
    "early_stopping",  # worker rank 0: step, metric, best, best_step, validations (in a row without improvement)
    "stop_requested",  # launcher or worker: signal
    "worker_failed",  # a worker: rank, coordinates, phase, step, exception, message, attempt
    "restart",  # launcher: attempt, reason, pause_seconds (before the start)
    "note",  # either: message
    "outcome",  # the writer of outcome.json: exit_code, reason
]


def record_event(directory: RunDirectory, event: EventName, **details: Any) -> None:
    """Append one event with the wall-clock time in seconds since 1970."""
    append_line(directory.events, {"time": time.time(), "event": event, **details})
