"""Rows of steps whose gradient norm is exactly 0: when they are told, and when they end a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megalaunch.engine.run_end import RunEnd
from megalaunch.engine.train.step_guards import ZeroGradientGuard
from megalaunch.engine.train.train_step import StepResult


def steps_until_the_end(limit: int, *norms: float | None) -> tuple[int | None, list[int]]:
    """(step at which the run ended, steps that were warned of); a norm of None: a step without labels."""
    warned: list[int] = []
    record = SimpleNamespace(event=lambda name, step, limit: warned.append(step))
    found = ZeroGradientGuard(limit)
    for step, norm in enumerate(norms, 1):
        try:
            found.update(step, StepResult(2.0, norm or 0.0, 1e-3, 0 if norm is None else 64, None), record)
        except RunEnd as ending:
            return ending.step, warned
    return None, warned


@pytest.mark.parametrize(
    ("limit", "norms", "ended", "warned"),
    [
        (3, (1.0, 0.0, 0.0, 0.0, 0.0), 4, [2]),
        (3, (0.0, 0.0, 1e-30, 0.0, 0.0, 0.0), 6, [1, 4]),
        (3, (0.0, None, 0.0, None, 0.0), 5, [1]),
        (3, (None, None, None, None), None, []),
        (1, (1.0, 0.0), 2, [2]),
        (0, (0.0,) * 50, None, [1]),
    ],
)
def test_only_rows_of_zeros_end_a_run(limit, norms, ended, warned):
    assert steps_until_the_end(limit, *norms) == (ended, warned)
