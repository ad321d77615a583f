"""Cross-check the time model: predict each published run with constants fitted to the other runs of its stack."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from published_runs import Published

from megalaunch.plan.cost import Stack

FITTED = ("matmul_16", "matmul_8", "tp_exposed")
"""The constants that any row was used for: efficiency of matmuls, exposed part of tensor-parallel communication."""
_STEP = 0.02


def leave_one_out(runs: Sequence[Published]) -> list[float]:
    """Return for each run the error of its predicted rate, with constants fitted to all other runs.

    Each fit is one Gauss-Newton step in log tokens/s, by least squares, from the constants of the profile; the left-out
    run is then predicted by the model itself.
    """
    errors = np.array([np.log1p(run.error()) for run in runs])
    slopes = np.stack(
        [[(np.log1p(run.error(_scaled(run.stack, {name: _STEP}))) - before) / _STEP for name in FITTED]
         for run, before in zip(runs, errors, strict=True)]
    )  # fmt: skip
    found = []
    for index, run in enumerate(runs):
        others = np.arange(len(runs)) != index
        change, *_ = np.linalg.lstsq(slopes[others], -errors[others], rcond=1e-3)
        found.append(run.error(_scaled(run.stack, dict(zip(FITTED, change, strict=True)))))
    return found


def _scaled(stack: Stack, changes: dict[str, float]) -> Stack:
    """Return the stack with constants grown by fractions of themselves."""
    for name, change in changes.items():
        stack = stack.with_value(name, getattr(stack, name).value * (1 + change))
    return stack
