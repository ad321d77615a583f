"""The time model against published throughput of NVIDIA's stacks on H100.

Calibrated on three rows only, named here; the others test what those three constants foretell.
"""

from __future__ import annotations

import statistics

import pytest
from published_runs import BRIDGE, CALIBRATED, DGXC

from megalaunch.plan.cost import step_time


def _error(run):
    return step_time(run.spec).tokens_per_second_per_device / run.tokens - 1


@pytest.fixture(scope="module")
def errors():
    return {run.name: _error(run) for run in (*DGXC, *BRIDGE)}


def test_the_dgxc_and_bridge_rows(errors):
    table = "\n".join(f"{name:28}{100 * error:+6.1f} %" for name, error in errors.items())
    assert statistics.median(map(abs, errors.values())) <= 0.08, table
    assert max(map(abs, errors.values())) <= 0.15, table


def test_the_rows_that_nothing_was_set_on(errors):
    unseen = [abs(error) for name, error in errors.items() if name not in CALIBRATED.values()]
    assert len(unseen) == len(errors) - 3
    assert statistics.median(unseen) <= 0.08
    assert max(unseen) <= 0.15


def test_the_calibrated_rows_are_met(errors):
    assert all(abs(errors[name]) < 0.01 for name in CALIBRATED.values())
