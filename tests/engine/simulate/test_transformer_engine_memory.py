"""The memory model against steps whose linear layers allocate as Transformer Engine's, copies of weights included."""

from __future__ import annotations

import pytest
from made_specs import resolved
from slow_cases import slow_but
from transformer_engine_allocations import install_allocations

from megalaunch.engine.simulate import deep_plan as simulation
from megalaunch.plan.memory.rank import memory_by_rank

CLOSE = 0.05
LLAMA = (
    "model=llama3_8b", "model.num_layers=3", "model.hidden_size=1024", "model.ffn_hidden_size=3584",
    "model.num_attention_heads=16", "model.num_query_groups=4", "model.head_dim=64", "model.vocab_size=16384",
)  # fmt: skip
FEW_WORDS = "model.vocab_size=1024"
GATED = "model.attention_output_gate=true"
EXPERTS = ("model=mixtral_8x7b", *LLAMA[1:7], FEW_WORDS)
LATENT = (
    "model=deepseek_v2_lite", "model.num_layers=3", "model.moe.num_experts=null", *LLAMA[2:5], FEW_WORDS,
    "model.num_query_groups=16", "model.mla.kv_lora_rank=256", "model.mla.q_lora_rank=384",
    "model.mla.qk_nope_head_dim=64", "model.mla.qk_rope_head_dim=32", "model.mla.v_head_dim=48",
)  # fmt: skip
# Layout, ranks, [global batch, micro batch, sequence], and overrides.
DENSE = ("dp", 1, (4, 4, 1024), (*LLAMA, FEW_WORDS))
MIXTURE = ("ep4", 4, (16, 2, 2048), EXPERTS)
CASES = [
    DENSE,
    MIXTURE,
    ("dp", 1, (8, 4, 2048), LLAMA),  # the peak is in the loss
    ("dp", 1, (1, 1, 256), LLAMA),  # at the end of a step
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, "recompute=full")),
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, "recompute=selective", "recompute.modules=[mlp]")),
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, "precision.fp8.recipe=blockwise")),
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, "precision.fp8.recipe=mxfp8")),
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, "precision.fp8.recipe=delayed")),
    ("dp", 1, (8, 4, 1024), LATENT),
    ("tp2", 2, (8, 4, 1024), (*LLAMA, FEW_WORDS)),
    ("tp2sp", 2, (8, 4, 1024), (*LLAMA, FEW_WORDS)),
    ("dp", 1, (8, 4, 2048), (*LLAMA, FEW_WORDS, GATED)),
    ("tp4", 4, (8, 4, 2048), (*LLAMA, FEW_WORDS, GATED)),
    ("tp4sp", 4, (8, 4, 2048), (*LLAMA, FEW_WORDS, GATED, "recompute=selective", "recompute.modules=[attention]")),
    ("tp4sp", 4, (8, 4, 2048), (*LLAMA, FEW_WORDS)),
    ("tp4sp", 4, (8, 1, 8192), (*LLAMA, FEW_WORDS)),
    ("cp2", 2, (8, 4, 2048), (*LLAMA, FEW_WORDS)),
    ("cp2", 2, (4, 1, 8192), (*LLAMA, FEW_WORDS)),
    ("tp2spcp2", 4, (8, 2, 4096), (*LLAMA, FEW_WORDS)),
    ("zero1", 8, (16, 1, 256), (*LLAMA, FEW_WORDS)),
    ("zero2", 8, (32, 2, 1024), (*LLAMA, FEW_WORDS)),
    ("zero2", 8, (16, 1, 256), (*LLAMA, FEW_WORDS)),
    ("zero3", 8, (32, 2, 1024), (*LLAMA, FEW_WORDS)),
    ("pp3", 3, (6, 1, 2048), (*LLAMA, FEW_WORDS)),
    ("ep2etp2", 4, (16, 2, 2048), EXPERTS),
    ("tp2sp", 2, (8, 2, 2048), EXPERTS),
    ("ep2zero2", 4, (16, 2, 2048), EXPERTS),
    ("tp4", 4, (8, 4, 2048), ("model=qwen3_8b", *LLAMA[1:], FEW_WORDS)),
    ("dp", 1, (8, 4, 1024), ("model=gpt2_124m", "model.num_layers=3", FEW_WORDS)),
]


@pytest.mark.parametrize(("layout", "ranks", "batch", "overrides"), slow_but(CASES, DENSE, MIXTURE))
def test_the_peak_of_a_step(layout, ranks, batch, overrides, monkeypatch):
    total, micro, length = batch
    spec, _ = resolved(
        *overrides,
        "platform=h100",
        "cluster.nodes=1",
        f"cluster.devices_per_node={ranks}",
        f"parallel={layout}",
        "precision=fp8",
        "precision.fp8.implementation=transformer_engine",
        f"batch.sequence_length={length}",
        f"batch.micro_batch_size={micro}",
        f"batch.global_batch_size={total}",
        "train.steps=10",
    )
    install_allocations(monkeypatch)
    monkeypatch.setattr(simulation, "_refuse_libraries", lambda spec: None)
    measured, predicted = simulation.deep_plan(spec, 0), memory_by_rank(spec)[0]
    table = f"\nmeasured in {measured.phase}: {measured.kinds}\npredicted {predicted.phase}: {predicted.kinds}"
    assert predicted.total == pytest.approx(measured.total, rel=CLOSE), table
