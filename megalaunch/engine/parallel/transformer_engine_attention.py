"""Attention in fp8 by Transformer Engine (`precision.fp8.dot_product_attention`): which layers, and their histories.

Attention of a decoder layer whose projections are in bf16 computes in bf16: it is taken out of the autocast that spans
the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megalaunch.engine.model.attention.attention import SelfAttention
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.moe.experts import GroupedLinear
from megalaunch.engine.precision.transformer_engine import Autocast, TransformerEngine
from megalaunch.engine.precision.transformer_engine_attention import Float8Attention
from megalaunch.engine.precision.transformer_engine_histories import OF_ATTENTION, HistoriesOfLayer
from megalaunch.schema.precision import Float8Spec


def apply_float8_attention(
    model: Decoder,
    layers: Mapping[str, Linear | GroupedLinear],
    library: TransformerEngine,
    autocast: Autocast,
    settings: Float8Spec,
    device: torch.device,
) -> Iterator[HistoriesOfLayer]:
    """Let attention whose projections are among `layers` compute in fp8, in place; yield its histories."""
    chosen = set(layers.values())
    for name, block in model.named_modules():
        if not isinstance(block, SelfAttention):
            continue
        if chosen.isdisjoint(block.modules()):
            outside = Autocast(library, settings, enabled=False)
            block.register_forward_pre_hook(outside.begin_pass)
            block.register_forward_hook(outside.end_pass, always_call=True)
        else:
            block.float8 = Float8Attention(autocast, settings.amax_history_len, device)
            yield HistoriesOfLayer(block.float8, (f"{name}.core_attention",), operands=OF_ATTENTION)
