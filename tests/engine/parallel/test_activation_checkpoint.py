"""Recomputed activations change no number, under any kind of parallelism, and are no longer kept."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from oracle import few_samples, hold_to_one_process, small_spec
from slow_cases import rotating, slow_but

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.parallel.activation_checkpoint import OutputDiscardingCheckpoint, apply_recompute
from megalaunch.plan.layers import Layer
from megalaunch.plan.memory import CPU_ENGINE
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.saved_activations import rows_with_bytes
from megalaunch.schema import RunSpec
from megalaunch.schema.recompute import RecomputeSpec

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CHOICES: dict[str, dict[str, Any]] = {
    "full": {"recompute__granularity": "full"},
    "some layers": {"recompute__granularity": "full", "recompute__method": "block", "recompute__num_layers": 2},
    "two layers as one": {"recompute__granularity": "full", "recompute__num_layers": 2},
    "parts": {"recompute__granularity": "selective", "recompute__modules": ["attention", "norm", "activation"]},
    "mlp": {"recompute__granularity": "selective", "recompute__modules": ["mlp"]},
    "mlp and norm": {"recompute__granularity": "selective", "recompute__modules": ["norm", "mlp"]},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel__dp": 2},
    "dp2 zero3": {"parallel__dp": 2, "parallel__data_sharding": "optim_grads_params", "batch__micro_batch_size": 1},
    "tp2 sp": {"parallel__dp": 1, "parallel__tp": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__dp": 1, "parallel__cp": 2},
    # Gradients of weights come after those of what the activation reads, from its output made once more.
    "pp2 zero_bubble": {
        "parallel__dp": 1,
        "parallel__pp": 2,
        "parallel__schedule": "zero_bubble",
        "model__num_layers": 4,
        "model__activation": "swiglu",
    },
}


CROSSED = ("full", "two layers as one", "parts")
QUICK = ("full", "pp2 zero_bubble")
DAILY = [QUICK, ("full", "tp2 sp"), *rotating(CROSSED, LAYOUTS, 4)]


@pytest.mark.parametrize(
    ("choice", "layout"),
    slow_but(product(CROSSED, LAYOUTS), QUICK, every=DAILY),
)
def test_every_layout(layout, choice):
    values = {**LAYOUTS[layout], **CHOICES[choice], "model__vocab_size": 64}
    hold_to_one_process(small_spec(**few_samples(values)))


@pytest.mark.parametrize("choice", slow_but(["some layers", "mlp", "mlp and norm"], "mlp"))
def test_other_choices(choice):
    spec = small_spec(**LAYOUTS["dp2"], **CHOICES[choice])
    hold_to_one_process(spec)


def _kept(spec: RunSpec | None = None, **settings: Any) -> int:
    """Bytes that are alive after a small decoder's forward pass."""
    model = build_decoder((spec or small_spec()).model)
    init_weights(model, 0)
    apply_recompute(model, RecomputeSpec(**settings))
    with LiveBytes() as live:
        output = model(torch.zeros(2, 16, dtype=torch.int64))
        assert output.requires_grad
        return live.total


def test_less_is_kept():
    everything, full = _kept(granularity="none"), _kept(granularity="full")
    block = _kept(granularity="full", method="block", num_layers=1)
    parts = _kept(granularity="selective", modules=("norm", "activation"))
    assert full < block < everything
    assert full < parts < everything
    assert _kept(granularity="full", num_layers=3) < full
    assert parts < _kept(granularity="selective", modules=("norm",)) < everything
    assert _kept(granularity="selective", modules=("norm", "mlp")) < _kept(granularity="selective", modules=("mlp",))


def test_less_of_experts_is_kept():
    spec = small_spec(model__moe={"num_experts": 4, "top_k": 2, "ffn_hidden_size": 40, "shared_ffn_hidden_size": 40})
    everything, full = _kept(spec, granularity="none"), _kept(spec, granularity="full")
    experts = _kept(spec, granularity="selective", modules=("moe",))
    assert full < _kept(spec, granularity="selective", modules=("norm", "moe")) < experts
    assert experts < _kept(spec, granularity="selective", modules=("activation",)) < everything
    assert everything - experts > 0.7 * (everything - full)


@pytest.mark.parametrize("gate", [False, True])
def test_activations_of_shared_experts_are_not_kept(gate):
    """As many bytes as the rows of the planner say; `moe` discards them, too."""
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 40, "shared_ffn_hidden_size": 40}
    spec = small_spec(model__moe=moe | {"shared_expert_gate": gate})
    everything, shared = (
        _kept(spec, granularity=choice, modules=("shared_experts",)) for choice in ("none", "selective")
    )
    recompute = replace(spec.recompute, granularity="selective", modules=("shared_experts",))
    dtypes = DtypesAndGroups.from_spec(replace(spec, recompute=recompute))
    layer = Layer(0, experts=True, window=None, mtp=False)
    rows = rows_with_bytes(spec.model, layer, dtypes, CPU_ENGINE)
    discarded = sum(size for _, size, again in rows if again)
    assert everything - shared == spec.model.num_layers * 2 * 16 * discarded
    with_norm = _kept(spec, granularity="selective", modules=("norm", "shared_experts"))
    assert with_norm < min(shared, _kept(spec, granularity="selective", modules=("norm",)))
    activation = _kept(spec, granularity="selective", modules=("activation",))
    assert _kept(spec, granularity="selective", modules=("activation", "shared_experts")) < min(shared, activation)
    assert _kept(spec, granularity="selective", modules=("moe",)) < shared


def test_queries_keys_and_values_of_latent_attention_are_not_kept():
    latent = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    spec = small_spec(model__mla=latent, model__num_attention_heads=4, model__num_query_groups=4, model__head_dim=10)
    everything, up = _kept(spec, granularity="none"), _kept(spec, granularity="selective", modules=("mla_up",))
    per_token = 4 * 4 * (10 + 10 + 5)  # fp32, heads, widths of a query, a key and a value
    assert everything - up == spec.model.num_layers * 2 * 16 * per_token
    both = _kept(spec, granularity="selective", modules=("mla_up", "norm"))
    assert both < min(up, _kept(spec, granularity="selective", modules=("norm",)))
    everything_but_inputs = _kept(spec, granularity="selective", modules=("mla_up", "attention"))
    assert everything_but_inputs < min(up, _kept(spec, granularity="selective", modules=("attention",)))


def test_nothing_is_remembered_after_the_layer():
    model = build_decoder(small_spec().model)
    init_weights(model, 0)
    apply_recompute(model, RecomputeSpec(granularity="selective", modules=("norm", "mlp")))
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with LiveBytes() as live:
        with torch.no_grad():
            del_me = model(tokens)
            assert live.total == del_me.untyped_storage().nbytes()
            del del_me
        model(tokens).sum().backward()
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert live.total == 0


def test_a_forward_pass_without_a_backward_pass_leaves_nothing():
    """A saved output that holds its own operator is a cycle that the garbage collector does not see."""
    x = torch.ones(4, requires_grad=True)
    with LiveBytes() as live:
        OutputDiscardingCheckpoint().run_layer(torch.exp, x)  # exp saves its output
        gc.collect()
        assert live.total == 0
