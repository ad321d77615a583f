"""The planner's table of saved activations against what autograd keeps of our own decoder, byte for byte."""

from __future__ import annotations

import pytest
import torch
from live_bytes import LiveBytes
from made_specs import resolved

from megalaunch.engine.model.build import build_decoder
from megalaunch.kernels import matmul
from megalaunch.kernels.causal_attention import blocks_are_faster
from megalaunch.plan.layers import list_layers
from megalaunch.plan.memory import CPU_ENGINE
from megalaunch.plan.memory.dtypes_and_groups import DtypesAndGroups
from megalaunch.plan.memory.saved_activations import rows_with_bytes

TOKENS = 64
HEADS = ("model.mla.qk_nope_head_dim=12", "model.mla.qk_rope_head_dim=8", "model.mla.v_head_dim=6")
FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _kept_by_autograd(spec) -> int:
    """Bytes of all storages that autograd saves in one forward pass, parameters left out."""
    torch.manual_seed(0)
    model = build_decoder(spec.model).to(FORMATS[spec.precision.compute_dtype])
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(0, spec.model.vocab_size, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(tokens)
    return sum(kept.values())


SHAPES = (
    (),
    ("model.num_query_groups=2",),
    ("model.ffn_hidden_size=96", "model.hidden_size=96", "model.head_dim=16"),
    ("model.qk_norm=full",),
    ("model.qk_norm=head",),
    ("model.parallel_residual=true",),
    ("model.attention_output_gate=true",),
)
LATENT_SHAPES = (
    ("model.mla.kv_lora_rank=24", "model.mla.q_lora_rank=40", *HEADS),
    ("model.mla.kv_lora_rank=24", *HEADS),
)
PRECISIONS = (("bf16", None), ("fp32", None))
AMX = ("bf16", "AMX")  # not of latent attention: there torch's kernel saves values padded to the width of keys


@pytest.mark.parametrize(
    ("shape", "precision", "unit"),
    [
        *((shape, *precision) for shape in SHAPES + LATENT_SHAPES for precision in PRECISIONS),
        *((shape, *AMX) for shape in SHAPES),
    ],
)
def test_a_layer_keeps_what_the_table_says(shape, precision, unit, monkeypatch):
    monkeypatch.setattr(matmul, "_unit", lambda: unit)
    overrides = (
        "recipe=tiny",
        "data.corpus=x",
        f"precision={precision}",
        f"batch.sequence_length={TOKENS}",
        "tokenizer.vocab_size=512",
        *shape,
    )
    one, _ = resolved(*overrides, "model.num_layers=1")
    two, _ = resolved(*overrides, "model.num_layers=2")
    measured = (_kept_by_autograd(two) - _kept_by_autograd(one)) / TOKENS
    rows = rows_with_bytes(one.model, list_layers(one.model)[0], DtypesAndGroups.from_spec(one), CPU_ENGINE)
    blocks = blocks_are_faster(torch.empty(1, 1, TOKENS, 1, dtype=FORMATS[precision]))  # which have no use for it
    assert sum(size for row, size, _ in rows if not (blocks and row.name.startswith("logsumexp"))) == measured


MIXTURES = {
    "softmax": (),
    "shared": (
        "model.moe.shared_ffn_hidden_size=64",
        "model.moe.shared_expert_gate=true",
        "model.moe.z_loss_coeff=0.1",
    ),
    "sigmoid": ("model.moe.score=sigmoid", "model.moe.normalize_top_k=true", "model.moe.router_dtype=fp64"),
    "padded": ("model.moe.capacity_factor=1.5", "model.moe.pad_to_capacity=true"),
}


@pytest.mark.parametrize("precision", FORMATS)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_layer_of_experts_keeps_what_the_table_says(mixture, precision):
    """All that is alive, to 1 %: order of rows too, which autograd does not see; a microbatch's counts are no rows."""
    tokens = 256
    overrides = (
        "recipe=tiny",
        "data.corpus=x",
        f"precision={precision}",
        f"batch.sequence_length={tokens}",
        "tokenizer.vocab_size=512",
        "model.moe.num_experts=8",
        "model.moe.ffn_hidden_size=96",
        *MIXTURES[mixture],
    )
    one, _ = resolved(*overrides, "model.num_layers=1")
    two, _ = resolved(*overrides, "model.num_layers=2")
    measured = (_alive(two, tokens) - _alive(one, tokens)) / tokens
    rows = rows_with_bytes(one.model, list_layers(one.model)[0], DtypesAndGroups.from_spec(one), CPU_ENGINE)
    blocks = blocks_are_faster(torch.empty(1, 1, tokens, 1, dtype=FORMATS[precision]))
    expected = sum(size for row, size, _ in rows if not (blocks and row.name.startswith("logsumexp")))
    assert expected == pytest.approx(measured, rel=0.01)


def _alive(spec, tokens: int) -> int:
    torch.manual_seed(0)
    model = build_decoder(spec.model).to(FORMATS[spec.precision.compute_dtype])
    with LiveBytes() as live:
        output = model(torch.randint(0, spec.model.vocab_size, (1, tokens)))
        assert output.requires_grad
        return live.total
