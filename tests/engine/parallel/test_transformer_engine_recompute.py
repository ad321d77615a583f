"""Recomputation of layers with delayed scales of Transformer Engine: the numbers and histories of a run without it.

The stand-in updates scales where the autocast of a forward pass ends, so that a layer that computes again would have
other ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine_stand_in as stand_in
from forked_ranks import run_ranks
from oracle import joined_stages
from resumed_run import Run
from slow_cases import slow_but
from transformer_engine_runs import library_spec, stand_in_with_attention, train_in_fp8

from megalaunch.engine.parallel.float8 import float8_states
from megalaunch.engine.precision import policy
from megalaunch.engine.precision.transformer_engine import Autocast

FP8: dict[str, Any] = {"recipe": "delayed", "implementation": "transformer_engine", "amax_history_len": 4}
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}
FULL: dict[str, Any] = {"recompute__granularity": "full"}
IN_ATTENTION: dict[str, Any] = {
    "precision__fp8": FP8 | {"dot_product_attention": True},
    "model__attention_backend": "te",
}
TP2: dict[str, Any] = {"parallel__tp": 2, "parallel__sequence_parallel": True}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute__granularity": "selective", "recompute__modules": modules}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, FULL),
    "full, some in bf16": ({"precision__fp8": FP8 | {"first_layers_bf16": 1}}, FULL),
    "full, two layers as one": ({}, FULL | {"recompute__num_layers": 2}),
    "full, half of the layers": ({}, FULL | {"recompute__method": "block", "recompute__num_layers": 2}),
    "mlp": ({}, _selective("mlp")),
    "tp2 sp, full": (TP2, FULL),
    "tp2 sp, mlp, attention": (TP2 | IN_ATTENTION, _selective("mlp", "attention")),
    "pp2, full": ({"parallel__pp": 2, "parallel__schedule": "1f1b"}, FULL),
    "pp2 interleaved, full": ({"parallel__pp": 2, "parallel__vpp": 2, "parallel__schedule": "interleaved"}, FULL),
    "zero3, full": ({"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params"}, FULL),
    "cp2, full": ({"parallel__cp": 2, "parallel__cp_comm_type": ("p2p",)}, FULL),
    "attention in fp8": (IN_ATTENTION, _selective("attention")),
    "attention in fp8, full": (IN_ATTENTION, FULL),
    "experts": ({"model__moe": MOE}, _selective("moe")),
    "ep2, full": ({"parallel__dp": 2, "parallel__ep": 2, "model__moe": MOE}, FULL),
}
QUICK = ("full", "attention in fp8")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    with stand_in_with_attention(monkeypatch):
        yield


def _spec(values: dict[str, Any]) -> Any:
    batch = {"model__num_query_groups": 4, "batch__micro_batch_size": 2, "batch__global_batch_size": 8}
    return library_spec({}, **{"precision__fp8": FP8, **batch, **values})


def _trained(spec: Any) -> Any:
    return joined_stages(run_ranks(spec.cluster.devices_per_node, train_in_fp8, spec))


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK, every=["tp2 sp, full", "pp2, full", "ep2, full", "mlp"]))
def test_losses_and_gradients_are_those_without_it(case):
    """To the bit: nothing else may change them."""
    values, recompute = CASES[case]
    found, expected = _trained(_spec(values | recompute)), _trained(_spec(values))
    assert found.losses == expected.losses
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=0)


def _after_steps(spec: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """The entries that two steps make on this rank, and the histories after them."""
    policy._FORMATS["fp8"] = torch.float32
    one = Run(spec)
    one.steps(range(1, 3))
    return stand_in.STATE.manager.entries, dict(float8_states(one.model))


@pytest.mark.parametrize("case", slow_but(CASES, *QUICK, every=["pp2, full", "ep2, full"]))
def test_it_leaves_no_trace_in_histories(case):
    values, recompute = CASES[case]
    spec = _spec(values)
    devices = spec.cluster.devices_per_node
    found, expected = (run_ranks(devices, _after_steps, each) for each in (_spec(values | recompute), spec))
    for (entries, states), (wanted, histories) in zip(found, expected, strict=True):
        assert entries == wanted
        assert states.keys() == histories.keys()
        for name, history in histories.items():
            np.testing.assert_array_equal(states[name], history, err_msg=name)


@pytest.mark.parametrize("case", slow_but(["full", "mlp", "attention in fp8", "experts"], "full"))
def test_other_scales_would_give_other_gradients(case, monkeypatch):
    """What the tests above would not notice otherwise."""
    values, recompute = CASES[case]
    expected = _trained(_spec(values)).gradients
    monkeypatch.setattr(Autocast, "note_scales", lambda self, layer: None)
    found = _trained(_spec(values | recompute)).gradients
    assert any(not torch.equal(found[name], gradient) for name, gradient in expected.items())
