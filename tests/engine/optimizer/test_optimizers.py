"""Every optimizer gives the updates of one process under every kind of sharding, and goes on from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from oracle import hold_to_one_process, small_spec
from slow_cases import slow_but

from megalaunch.engine.optimizer.optimizer import _elementwise_rule
from megalaunch.engine.optimizer.update_rules import ParameterState, Update
from megalaunch.schema.optimizer import OptimizerSpec

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


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_an_update_divides_its_gradients_whatever_their_scale(name):
    """fp16's loss scale is a power of two, which costs no bit, and changes between updates."""

    def updated(scales):
        spec = OptimizerSpec(name=name, momentum=0.9)
        rule, weight = _elementwise_rule(spec), torch.linspace(-1, 1, 64)
        state = ParameterState({key: torch.zeros(64) for key in rule.state_names}, torch.zeros(()))
        for step, scale in enumerate(scales):
            gradient = torch.randn(64, generator=torch.Generator().manual_seed(step)) * scale
            rule.apply(Update([weight], [gradient], [state], 0.01, 0.1, scale))
        return torch.stack([weight, *state.tensors.values()])

    assert torch.equal(updated([2.0**16, 2.0**15, 2.0**17]), updated([1.0, 1.0, 1.0]))
