"""Every optimizer gives the updates of one process under every kind of sharding, and goes on from a checkpoint."""

from __future__ import annotations

import pytest
from oracle import hold_to_one_process, small_spec
from slow_cases import slow_but

SGD = {"optimizer__name": "sgd", "optimizer__lr": 0.3, "optimizer__momentum": 0.9}
OPTIMIZERS = {
    "sgd": SGD,
    "nesterov": {**SGD, "optimizer__nesterov": True},
    "no momentum": {**SGD, "optimizer__momentum": 0.0},
    "lion": {"optimizer__name": "lion", "optimizer__beta2": 0.99, "optimizer__weight_decay": 1.0},
    "muon": {"optimizer__name": "muon", "optimizer__lr": 0.01, "optimizer__nesterov": True},
}
LAYOUTS = {
    "tp2": {"parallel__tp": 2},
    "pp2": {"parallel__pp": 2, "parallel__schedule": "1f1b", "model__num_layers": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"},
    "cp2": {"parallel__cp": 2},
    "ep2": {"parallel__dp": 2, "parallel__ep": 2, "model__num_layers": 1, "model__moe": {"num_experts": 4, "top_k": 2}},
}
# Quick: each optimizer under one layout, the orthogonalised one under those that shard a matrix.
QUICK = [("sgd", "pp2"), ("lion", "dp2 zero3"), ("muon", "dp2 zero3")]
CASES = [(name, layout) for name in ("sgd", "lion", "muon") for layout in LAYOUTS]

EXPERTS = {"model__num_layers": 1, "model__moe": {"num_experts": 2, "top_k": 2}}
SHARDED_TWICE = {
    "tp2 zero3": {"parallel__dp": 2, "parallel__tp": 2, "parallel__sequence_parallel": True},
    "ep2 zero3, experts sharded by width": {"parallel__dp": 4, "parallel__ep": 2, **EXPERTS},
    "ep2 etp2": {"parallel__dp": 4, "parallel__ep": 2, "parallel__etp": 2, **EXPERTS},
}


DAILY = [
    *QUICK,
    ("muon", "tp2"),
    ("nesterov", "tp2"),
    ("no momentum", "dp2 zero3"),
    ("lion", "cp2"),
    ("muon", "ep2"),
]


@pytest.mark.parametrize(
    ("name", "layout"), slow_but([*CASES, ("nesterov", "tp2"), ("no momentum", "dp2 zero3")], *QUICK, every=DAILY)
)
def test_updates_equal_one_process(name, layout):
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **OPTIMIZERS[name], **LAYOUTS[layout]))


@pytest.mark.parametrize("layout", slow_but(SHARDED_TWICE, every=["tp2 zero3"]))
def test_muon_under_two_kinds_of_sharding(layout):
    zero3 = {"parallel__data_sharding": "optim_grads_params", **SHARDED_TWICE[layout]}
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **OPTIMIZERS["muon"], **zero3))


@pytest.mark.parametrize("tied", slow_but([False, True], True))
def test_embedding_and_head_have_their_own_rate(tied):
    """On two stages, where a tied head is a copy; the warmup begins above 0."""
    rates = {"optimizer__embedding_lr": 3e-3, "schedule__warmup_init_lr": 2e-4, "model__tie_word_embeddings": tied}
    hold_to_one_process(small_spec(batch__micro_batch_size=1, **rates, **LAYOUTS["pp2"]))
