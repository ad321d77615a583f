"""fp8 experts: the scales of one process under layouts that share an expert's samples, and delayed scales."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import oracle
import pytest
from float8_runs import SMALL_BLOCKS, WIDTH, assert_close, fine_spec, resumed, run, saved
from forked_ranks import run_ranks
from resumed_run import loaded_states
from slow_cases import rotating, slow_but

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.precision import float8

EXPERTS = {"model__moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 2 * WIDTH}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2 over tp2": {"tp": 2, "sequence_parallel": True, "ep": 2},
    "etp2 over tp2": {"tp": 2, "sequence_parallel": True, "etp": 2},
    "tp2 without ep": {"tp": 2, "sequence_parallel": True},
    "ep2 over cp2": {"cp": 2, "cp_comm_type": ("p2p",), "ep": 2},
    "dp2 zero3": {"dp": 2, "data_sharding": "optim_grads_params"},
    "pp2": {"pp": 2, "schedule": "1f1b"},
}
# Blocks along the rows of an expert hold the rows of one rank, in the order in which they come.
BLOCKS_OF_ONE_PROCESS = ("ep2 over tp2", "etp2 over tp2", "dp2 zero3", "pp2")
CASES = [
    *product(("tensorwise", "delayed", "rowwise"), LAYOUTS),
    *product(("blockwise", "mxfp8"), BLOCKS_OF_ONE_PROCESS),
]

QUICK = (("tensorwise", "ep2 over tp2"), ("rowwise", "tp2 without ep"))
DAILY = [
    *QUICK,
    *(("delayed", "etp2 over tp2"), ("rowwise", "etp2 over tp2")),
    *(("delayed", "pp2"), ("tensorwise", "ep2 over cp2"), ("rowwise", "dp2 zero3")),
    *rotating(("blockwise", "mxfp8"), BLOCKS_OF_ONE_PROCESS, 4),
]


@pytest.fixture(scope="module")
def one_rank_of():
    return cache(lambda recipe: run(fine_spec({}, recipe, **EXPERTS)))


@pytest.mark.parametrize(("recipe", "layout"), slow_but(CASES, *QUICK, every=DAILY))
def test_layouts_agree(recipe, layout, one_rank_of, monkeypatch):
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    monkeypatch.setattr(float8, "_BLOCKS", {**float8._BLOCKS, **SMALL_BLOCKS})
    assert_close(run(fine_spec(LAYOUTS[layout], recipe, **EXPERTS)), one_rank_of(recipe))


RESUMED = [("one rank", "one rank"), ("one rank", "ep2 over tp2"), ("ep2 over tp2", "one rank"), *(
    ("ep2 over tp2", layout) for layout in ("etp2 over tp2", "dp2 zero3", "pp2")
)]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second"), slow_but(RESUMED, ("ep2 over tp2", "one rank"), every=[("one rank", "ep2 over tp2")])
)
def test_delayed_scales_of_experts_resume(first, second, tmp_path, monkeypatch):
    """Each expert's history is in the checkpoint, whichever rank recorded it, and goes to the ranks that hold it."""
    monkeypatch.setattr(oracle, "SEQUENCE", 4 * WIDTH)
    before, after = (fine_spec(LAYOUTS.get(layout, {}), "delayed", **EXPERTS) for layout in (first, second))
    through = run_ranks(before.cluster.devices_per_node, saved, before, tmp_path)[0]
    (checkpoint,) = tmp_path.rglob("step_00000002")
    histories = {name: state for name, state in read_tensors(checkpoint).items() if name.startswith("fp8.")}
    of_experts = [state for name, state in histories.items() if "experts" in name]
    assert len(of_experts) == 2 * 3, "of three matrices in each of two layers"
    assert all((state[:, :2] > 0).all() for state in of_experts), "of each expert, in both steps"
    ranks = run_ranks(after.cluster.devices_per_node, loaded_states, after, checkpoint)
    for name, state in histories.items():
        found = [rank[name][1] for rank in ranks if name in rank]
        assert found
        assert all((values == state.numpy()).all() for values in found), name
    numbers = run_ranks(after.cluster.devices_per_node, resumed, after, checkpoint)[0]
    assert numbers.losses == pytest.approx(through.losses, rel=0.0 if first == second else 1e-4, abs=0)
