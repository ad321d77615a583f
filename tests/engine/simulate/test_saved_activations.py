"""The planner's table of saved activations against what autograd keeps of our own decoder, byte for byte."""

from __future__ import annotations

import pytest
import torch
from made_specs import resolved

from megalaunch.engine.model.build import build_decoder
from megalaunch.kernels import matmul
from megalaunch.kernels.causal_attention import blocks_are_faster
from megalaunch.plan.layers import list_layers
from megalaunch.plan.memory import CPU_ENGINE
from megalaunch.plan.memory.layer_dims import DtypesAndGroups
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
