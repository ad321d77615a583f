"""The lines of metrics.jsonl: their time, and keys of those that are no steps: validations, evaluations of tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

VALIDATION_LOSS = "validation_loss"
_TASKS = "lm_eval/"


def with_time(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line with the wall-clock time in seconds since 1970."""
    return {**line, "time": time.time()}


def validation_key(name: str) -> str:
    """Return the key of a named validation set's loss, as `validation_loss/code`."""
    return f"{VALIDATION_LOSS}/{name}"


def task_key(task: str, metric: str) -> str:
    """Return the key of a score of an lm-eval task, as `lm_eval/arc_easy/acc`."""
    return f"{_TASKS}{task}/{metric}"


def validation_losses(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the losses of a line by name: "" for the run's own validation data, else the validation set's."""
    keys = [key for key in record if key == VALIDATION_LOSS or key.startswith(f"{VALIDATION_LOSS}/")]
    return {key.removeprefix(VALIDATION_LOSS).removeprefix("/"): record[key] for key in keys}


def task_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of a line by `TASK/METRIC`."""
    return {key.removeprefix(_TASKS): value for key, value in record.items() if key.startswith(_TASKS)}


def is_validation(record: Mapping[str, Any]) -> bool:
    """Return whether a line is that of a validation."""
    return bool(validation_losses(record))


def is_task_evaluation(record: Mapping[str, Any]) -> bool:
    """Return whether a line is that of an evaluation of tasks."""
    return bool(task_scores(record))
