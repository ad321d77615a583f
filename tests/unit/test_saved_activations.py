"""The planner's table of saved activations against what autograd keeps of our own decoder, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from made_specs import resolved

from megalaunch.engine.families.registry import build_decoder
from megalaunch.plan.layers import layers_of
from megalaunch.plan.memory import ENGINE
from megalaunch.plan.memory.saved import rows_with_bytes
from megalaunch.plan.memory.widths import Formats

TOKENS = 64
# On a processor the plain form of SwiGLU keeps silu(gate) beside gate and up (kernels/swiglu.py).
ON_CPU = replace(ENGINE, activation_inputs=3)


def _kept_by_autograd(spec) -> int:
    """Bytes of all storages that autograd saves in one forward pass, parameters left out."""
    torch.manual_seed(0)
    model = build_decoder(spec.model).to(torch.bfloat16)
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


@pytest.mark.parametrize(
    "shape",
    [
        (),
        ("model.num_query_groups=2",),
        ("model.ffn_hidden_size=96", "model.hidden_size=96", "model.head_dim=16"),
    ],
)
def test_a_layer_keeps_what_the_table_says(shape):
    words = ("recipe=tiny", "data.corpus=x", "precision=bf16", "tokenizer.vocab_size=512", *shape)
    one, _ = resolved(*words, "model.num_layers=1")
    two, _ = resolved(*words, "model.num_layers=2")
    measured = (_kept_by_autograd(two) - _kept_by_autograd(one)) / TOKENS
    rows = rows_with_bytes(one.model, layers_of(one.model)[0], Formats.of(one), ON_CPU)
    # A processor makes the weights again without it (engine/model/processor_attention.py).
    assert sum(size for row, size, _ in rows if not row.name.startswith("log-sum of each softmax")) == measured
