"""fp8 experts: the scales of one process under layouts that share an expert's samples, and delayed scales."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import oracle
import pytest
from float8_runs import SMALL_BLOCKS, WIDTH, assert_close, fine_spec, run
from slow_cases import rotating, slow_but

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
