"""Convert the records of metrics.jsonl and events.jsonl to named figures for trackers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalaunch.launch.run_state import ThroughputBasis, number
from megalaunch.plan.batch import mean_batch_share
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.metrics import VALIDATION_LOSS, is_task_evaluation, is_validation
from megalaunch.schema import RunSpec

_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "weight_decay": "train/weight_decay",
    "tokens": "train/tokens",
    "loss_scale": "train/loss_scale",
    "skipped_steps": "train/skipped_steps",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "time/step_seconds",
    "data_seconds": "time/data_seconds",
    "memory_bytes": "memory/peak_bytes",
}
"""Figures by the key of a metrics record; those of validations, tasks, `moe_...` and `mtp_...` are named after it."""

_ENDS_A_PHASE = ("phase", "launch", "restart", "outcome")


def step_figures(record: Record, spec: RunSpec, scale: ThroughputBasis) -> dict[str, float]:
    """Return the figures of a metrics record: numbers that are finite; MFU where the chip's peak is known."""
    figures: dict[str, float] = {}
    for key, value in record.items():
        if is_validation({key: value}):
            figures |= dict(_by_layer(key.replace(VALIDATION_LOSS, "validation/loss"), value))
        elif is_task_evaluation({key: value}):
            figures |= dict(_by_layer(key, value))
        elif key.startswith(("moe_", "mtp_")):
            figures |= dict(_by_layer(f"{key[:3]}/{key[4:]}", value))
        elif key in _NAMES:
            figures |= dict(_by_layer(_NAMES[key], value))
    seconds, step = number(record, "step_seconds"), int(record["step"])
    if scale.peak_flops and seconds > 0:
        flops = scale.step_flops * mean_batch_share(spec, step, step) / seconds / scale.devices
        figures["speed/mfu"] = flops / scale.peak_flops
    return figures


def event_figures(record: Record, restarts: int, phase: Record | None) -> dict[str, float]:
    """Return the figures of an event.

    Args:
        restarts: number of restarts up to it.
        phase: the event that began the phase in which it is; None: it is in none.
    """
    figures: dict[str, float] = {}
    event = record.get("event")
    if event in ("launch", "restart"):
        figures["run/restarts"] = float(restarts)
    if event == "checkpoint":
        seconds = {"time/checkpoint_seconds": record.get("seconds"), "time/waited_for_checkpoint_seconds": None}
        seconds["time/waited_for_checkpoint_seconds"] = record.get("waited_seconds")
        figures |= {name: float(value) for name, value in seconds.items() if isinstance(value, (int, float))}
    if event in _ENDS_A_PHASE and phase is not None and phase["phase"] != "training":  # whose steps have their times
        figures[f"time/{str(phase['phase']).replace(' ', '_')}_seconds"] = number(record, "time") - number(
            phase, "time"
        )
    return figures


def phase_after(record: Record, phase: Record | None) -> Record | None:
    """Return the event that began the phase after an event, from that of the phase in which it is."""
    if record.get("event") == "phase":
        return record
    return None if record.get("event") in _ENDS_A_PHASE else phase


def _by_layer(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield a number under its name, and those of a list under name/index."""
    values = enumerate(value) if isinstance(value, list) else [(None, value)]
    for index, each in values:
        if isinstance(each, (int, float)) and not isinstance(each, bool) and math.isfinite(each):
            yield name if index is None else f"{name}/{index}", float(each)
