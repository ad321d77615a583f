"""The time model against published throughput on H100: PyTorch-native stacks and NVIDIA's, each with its own profile.

Constants are shared by all rows of a stack. Three are calibrated, each on one row of NVIDIA's; every row is also
predicted with constants fitted to the other rows alone.
"""

from __future__ import annotations

import statistics

import pytest
from leave_one_out import leave_one_out
from published_llmq_runs import ONE_DEVICE
from published_pytorch_runs import PYTORCH
from published_runs import BRIDGE, CALIBRATED, DGXC, OTHERS

NVIDIA = (*DGXC, *BRIDGE)
TIMED_OTHERS = tuple(run for run in OTHERS if run.tokens is not None)


def _table(runs, errors):
    return "\n".join(f"{run.name:28}{100 * error:+6.1f} %" for run, error in zip(runs, errors, strict=True))


@pytest.mark.parametrize(
    ("runs", "median"),
    [(PYTORCH, 0.08), (NVIDIA, 0.08), (TIMED_OTHERS, 0.08), (ONE_DEVICE, 0.15)],
    ids=["pytorch", "nvidia", "others", "llmq"],
)
def test_every_row_is_within_15_percent(runs, median):
    errors = [run.error() for run in runs]
    assert statistics.median(map(abs, errors)) <= median, _table(runs, errors)
    assert max(map(abs, errors)) <= 0.15, _table(runs, errors)


@pytest.mark.parametrize("runs", [PYTORCH, NVIDIA], ids=["pytorch", "nvidia"])
def test_every_row_is_foretold_by_the_others(runs):
    errors = leave_one_out(runs)
    assert statistics.median(map(abs, errors)) <= 0.08, _table(runs, errors)
    assert max(map(abs, errors)) <= 0.15, _table(runs, errors)


def test_the_calibrated_rows_are_met():
    assert all(abs(run.error()) < 0.01 for run in NVIDIA if run.name in CALIBRATED.values())


def test_the_profile_matters():
    """The rows of one stack are missed with the kernels of another: eager ones by far."""
    for run in PYTORCH:
        fused = run.error(NVIDIA[0].stack)
        assert fused > run.error()
        if "eager" in run.name:
            assert fused > 0.3
