"""Layouts drawn at random, whatever axes and options they combine, against one process."""

from __future__ import annotations

from itertools import islice

import pytest
from oracle import hold_to_one_process
from random_layouts import Layout, name_of, random_runs, ranks_of, spec_of
from slow_cases import slow_but

DAILY = 1  # of the layouts drawn: that of the fewest ranks
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each run that is drawn; every layout has several ranks."""
    if "drawn" in metafunc.fixturenames:
        option = metafunc.config.getoption
        several = (run for run in random_runs(option("--seed")) if ranks_of(run) > 1)
        drawn = sorted(islice(several, option("--random")), key=ranks_of)
        cases = slow_but(drawn, every=drawn[:DAILY])
        metafunc.parametrize("drawn", cases, ids=name_of)


def test_a_layout_against_one_process(drawn: Layout):
    hold_to_one_process(spec_of(drawn), timeout=240)


def test_draws_are_various():
    """A sampler that always drew the same thing would prove nothing."""
    runs = list(islice(random_runs(0), 200))
    for key, least in {"parallel__schedule": 5, "parallel__cp_comm_type": 3, "parallel__data_sharding": 4}.items():
        assert len({run.get(key) for run in runs} - {None}) >= least, key
    for axis in ("dp", "pp", "cp", "tp"):
        assert {run[f"parallel__{axis}"] for run in runs} >= {1, 2}
    assert {run["recompute__granularity"] for run in runs} == {"none", "full", "selective"}
    assert any(run.get("parallel__dynamic_context_parallel") for run in runs)
    experts = [run for run in runs if "model__moe" in run]
    assert len(experts) > 30
    assert {(run["parallel__ep"], run["parallel__etp"]) for run in experts} >= {(1, 1), (2, 1), (4, 1), (2, 2)}
    depths = [run for run in runs if "model__mtp" in run]
    assert len(depths) > 20
    assert {run["parallel__pp"] for run in depths} >= {1, 2}
