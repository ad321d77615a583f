"""A stand-in for Transformer Engine's `DotProductAttention`, with the published signatures, in plain torch on CPUs.

Signatures, and what callers are held to, are those of transformer_engine/pytorch/attention/dot_product_attention/
dot_product_attention.py at 2.9 and 2.20; of arguments that came after 2.9 there are none here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from flash_attn_stand_in import aligned_attention, pieces_attention
from torch import Tensor, nn

PUBLISHED: dict[str, tuple[str, ...]] = {
    "DotProductAttention": (
        "num_attention_heads", "kv_channels", "num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type",
        "window_size", "sequence_parallel", "tp_size", "get_rng_state_tracker", "tp_group", "layer_number",
        "attention_type", "cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type", "softmax_scale", "softmax_type",
        "return_max_logit",
    ),
    "DotProductAttention.forward": (
        "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q", "cu_seqlens_kv",
        "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type",
        "window_size", "checkpoint_core_attention", "core_attention_bias_type", "core_attention_bias",
        "alibi_slopes", "fast_zero_fill", "inference_params", "pad_between_seqs", "fp8_output",
    ),
}  # fmt: skip


@dataclass
class State:
    """What the stand-in was asked for."""

    layers: list[DotProductAttention] = field(default_factory=list)
    calls: list[tuple[str, str, tuple[int, int]]] = field(default_factory=list)


STATE = State()


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
    ) -> None:
        super().__init__()
        assert attention_dropout == 0.0
        assert softmax_type == "vanilla"
        assert tp_size == 1
        self.heads, self.groups = num_attention_heads, num_gqa_groups or num_attention_heads
        self.widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.scale = softmax_scale or self.widths[0] ** -0.5
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        STATE.layers.append(self)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Any = None,
        alibi_slopes: Any = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
    ) -> Tensor:
        layout, kind = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        window = window_size or self.window_size or (-1, 0)
        q, k, v = query_layer, key_layer, value_layer
        assert (q.shape[-2], k.shape[-2], v.shape[-2]) == (self.heads, self.groups, self.groups)
        assert (q.shape[-1], k.shape[-1], v.shape[-1]) == (self.widths[0], *self.widths)
        assert window[1] == 0, "a causal mask"
        STATE.calls.append((layout, kind, window))
        if layout == "thd":
            assert kind in ("padding_causal", "padding_causal_bottom_right")
            assert cu_seqlens_q is not None
            assert cu_seqlens_kv is not None
            if kind == "padding_causal":  # aligned to the first query and key
                assert torch.equal(cu_seqlens_q, cu_seqlens_kv)
            lengths = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
            return pieces_attention(q, k, v, *lengths, self.scale, True, window, 0.0).flatten(-2)
        assert layout == "bshd"
        assert kind in ("causal", "causal_bottom_right")
        if kind == "causal":
            assert q.shape[1] == k.shape[1]
        rows = zip(q, k, v, strict=True)
        return torch.stack([aligned_attention(*row, self.scale, True, window, 0.0) for row in rows]).flatten(-2)


def add_attention(layers: ModuleType) -> None:
    """Add the class to a module transformer_engine.pytorch."""
    layers.DotProductAttention = DotProductAttention
