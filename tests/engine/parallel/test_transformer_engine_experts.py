"""Routed experts by Transformer Engine, on a stand-in that computes on CPUs: the numbers of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine_stand_in as stand_in
from float8_runs import assert_close, float8_spec, train
from forked_ranks import run_ranks
from oracle import assert_same, joined_stages, shake
from slow_cases import slow_but
from transformer_engine_runs import install_stand_in, library_spec, run_by_library, train_in_fp8

from megalaunch.engine.model.config import MLPConfig
from megalaunch.engine.model.moe.dispatcher import Dispatched
from megalaunch.engine.model.moe.experts import Experts
from megalaunch.engine.parallel.transformer_engine_experts import TransformerEngineExperts
from megalaunch.engine.precision.transformer_engine import Autocast, load_transformer_engine
from megalaunch.schema.precision import Float8Spec

MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
EP2: dict[str, Any] = {"dp": 2, "ep": 2}
TP2: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "ep2": (EP2, {}),
    "ep2 by all-gather": ({**EP2, "moe_token_dispatcher_type": "allgather"}, {}),
    "ep2 in two parts": ({**EP2, "overlap_moe_expert_parallel_comm": True}, {}),
    "etp2": ({"dp": 2, "etp": 2}, {}),
    "ep2 over tp2": ({**TP2, "ep": 2}, {}),
    "tp2 without ep": (TP2, {}),
    "dp2 optim": ({"dp": 2, "data_sharding": "optim"}, {}),
    "pp2 1f1b": ({"pp": 2, "schedule": "1f1b"}, {}),
    "shared experts": (EP2, {"model__moe": {**MOE, "shared_ffn_hidden_size": 16}}),
    "biases, one projection up": (EP2, {"model__mlp_bias": True, "model__activation": "gelu"}),
    "a capacity": (EP2, {"model__moe": {**MOE, "capacity_factor": 1.0}}),
    "padded to a capacity": (EP2, {"model__moe": {**MOE, "capacity_factor": 1.0, "pad_to_capacity": True}}),
    "a capacity on one rank": ({}, {"model__moe": {**MOE, "capacity_factor": 1.0, "pad_to_capacity": True}}),
    "layers recomputed": (EP2, {"recompute__granularity": "full"}),
    "experts recomputed": (EP2, {"recompute__granularity": "selective", "recompute__modules": ("moe",)}),
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    install_stand_in(monkeypatch)


BEFORE_A_RELEASE = {
    *("dp2 optim", "a capacity", "a capacity on one rank", "layers recomputed", "tp2 without ep", "shared experts"),
    *("ep2 over tp2", "ep2 by all-gather", "biases, one projection up", "experts recomputed"),
}


@pytest.mark.parametrize("case", slow_but(CASES, "one rank", "ep2", every=CASES.keys() - BEFORE_A_RELEASE))
def test_the_numbers_are_those_of_native_experts(case):
    layout, values = CASES[case]
    values = {"model__moe": MOE, "model__num_layers": 2, "batch__micro_batch_size": 2, **values}
    native = float8_spec(layout, "tensorwise", **{"precision__compute_dtype": "fp32", **values})
    expected = joined_stages(run_ranks(native.cluster.devices_per_node, train, native, True, shake))
    found = run_by_library(library_spec(layout, **values))
    assert_same(found.numbers, expected)
    width, experts = 16 // layout.get("etp", 1), 4 // layout.get("ep", 1)
    up, down = (experts, width, 32), (experts, 32, width)
    projections = [up, down] if "model__activation" in values else [up, up, down]
    assert found.experts == projections * (2 // layout.get("pp", 1))
    assert found.casts == 4 * (len(found.layers) + len(found.experts)), "once in each of three steps, and in validation"


@pytest.mark.slow
def test_tensorwise_scales_are_those_of_native_experts():
    """One scale for each matrix and for the rows of each expert: on one rank both have the same."""
    native = float8_spec({}, "tensorwise", model__moe=MOE)
    library = library_spec({}, model__moe=MOE)
    (expected,), (found,) = run_ranks(1, train, native, True), run_ranks(1, train_in_fp8, library)
    assert_close(found, expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("counts", [[0, 40, 3, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("on_host", [True, False])
def test_experts_without_rows_and_rows_without_an_expert(recipe, counts, on_host):
    torch.manual_seed(0)
    experts = Experts(4, 32, MLPConfig(width=16))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    library = load_transformer_engine()
    alignment = {"tensorwise": 16, "mxfp8": 32}[recipe]
    computed = TransformerEngineExperts(
        library, Autocast(library, Float8Spec(recipe=recipe)), experts, torch.float32, alignment
    )
    rows, valid = torch.randn(sum(counts) + 5, 32), sum(counts)
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    results = []
    for apply in (
        lambda x: computed(experts, Dispatched(x, offsets, None, counts if on_host else None)),
        lambda x: experts(x, offsets),
    ):
        x = rows.clone().requires_grad_()
        y = apply(x)
        assert y.shape == rows.shape
        experts.zero_grad()
        y[:valid].sum().backward()
        results.append([y[:valid].detach(), x.grad[:valid], *(p.grad.clone() for p in experts.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    assert stand_in.STATE.casts == 3
