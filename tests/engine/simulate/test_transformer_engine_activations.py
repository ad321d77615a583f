"""What the planner says a layer by Transformer Engine saves, against what is alive by the stand-in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformer_engine_stand_in as stand_in
from forked_ranks import run_ranks
from live_bytes import LiveBytes
from oracle import rank_mesh
from slow_cases import slow_but
from transformer_engine_runs import install_stand_in, library_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.parallel.float8 import apply_float8
from megalaunch.kernels.causal_attention import blocks_are_faster
from megalaunch.plan.layers import list_layers
from megalaunch.plan.memory import CPU_ENGINE
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.saved_activations import rows_with_bytes

TOKENS = 256
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 64}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
SIZES = {"model__hidden_size": 128, "model__ffn_hidden_size": 256, "model__head_dim": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "latent attention": {"model__mla": LATENT, "model__head_dim": 32},
    "experts": {"model__moe": MOE},
    "shared experts": {"model__moe": {**MOE, "shared_ffn_hidden_size": 64}},
}


def _kept(spec: Any) -> int:
    """Bytes that are alive after a forward pass, without parameters and copies of them."""
    stand_in.STATE.saves_8_bits = True
    model = build_decoder(spec.model).to(torch.bfloat16)
    apply_float8(model, spec, rank_mesh(spec))
    with LiveBytes() as live:
        output = model(torch.randint(0, spec.model.vocab_size, (1, TOKENS)))
        assert output.requires_grad
        return live.total


@pytest.mark.parametrize("shape", slow_but(SHAPES, "dense", "shared experts"))
def test_a_layer_keeps_what_the_table_says(shape, monkeypatch):
    install_stand_in(monkeypatch)
    batch = {"batch__sequence_length": TOKENS, "batch__micro_batch_size": 1}
    one, two = (library_spec({}, model__num_layers=layers, **{**SIZES, **batch, **SHAPES[shape]}) for layers in (1, 2))
    (more,), (less,) = run_ranks(1, _kept, two), run_ranks(1, _kept, one)
    profile = replace(CPU_ENGINE, fp8_inputs=True, input_copies=True)
    rows = rows_with_bytes(one.model, list_layers(one.model)[0], DtypesAndGroups.from_spec(one), profile)
    blocks = blocks_are_faster(torch.empty(1, 1, TOKENS, 1, dtype=torch.bfloat16))
    idle = ("logsumexp", "attention's output in 16 bits") if blocks else ()
    planned = sum(size for row, size, _ in rows if not row.name.startswith(idle))
    assert planned == pytest.approx((more - less) / TOKENS, rel=0.05)
