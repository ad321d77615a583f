"""A stand-in for Transformer Engine's `DotProductAttention`, with the signatures of 2.9, in plain torch on CPUs.

What callers are held to is what 2.9 and 2.20 document or assert. In an autocast with `fp8_dpa` it casts to fp8 if the
stand-in of the linear layers does, by scales of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine_stand_in as library
from flash_attn_stand_in import aligned_attention, pieces_attention
from te_float8_attention import Casts, Float8AttentionFn
from torch import Tensor


@dataclass
class State:
    """What the stand-in was asked for; `in_float8`: the layers of the calls that computed in fp8."""

    layers: list[DotProductAttention] = field(default_factory=list)
    calls: list[tuple[str, str, tuple[int, int]]] = field(default_factory=list)
    in_float8: list[DotProductAttention] = field(default_factory=list)


STATE = State()


class DotProductAttention(library._Module):
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
        self.cp_group = cp_group
        STATE.layers.append(self)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: list[int], cp_stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        assert cp_comm_type == "p2p"
        assert cp_global_ranks == dist.get_process_group_ranks(cp_group)
        assert cp_stream is not None
        self.cp_group = cp_group

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
        if getattr(library.STATE.recipe, "fp8_dpa", False):
            assert (layout, kind, window) == ("bshd", "causal", (-1, 0)), "a mask without a kernel in fp8"
            return self._in_float8(q, k, v).flatten(-2)
        if self.cp_group is not None:
            assert (layout, kind, window) == ("bshd", "causal", (-1, 0))
            return self._ring(q, k, v).flatten(-2)
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

    def _in_float8(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        STATE.in_float8.append(self)
        self.init_fp8_metadata(num_gemms=3)
        recipe = library.STATE.recipe
        library.STATE.manager.register(recipe, self.meta)
        positions = torch.arange(q.shape[1], device=q.device)
        if self.cp_group is not None:
            ranks, rank = self.cp_group.size(), self.cp_group.rank()
            early, late = positions.chunk(2)
            positions = torch.cat((early + rank * len(early), late + (2 * ranks - 2 - rank) * len(early)))
            k, v = (_in_order(_Gather.apply(x, self.cp_group).unbind()) for x in (k, v))
        k, v = (x.repeat_interleave(self.heads // self.groups, dim=2) for x in (k, v))
        mask = torch.arange(k.shape[1], device=q.device) <= positions[:, None]
        if not library.STATE.quantize:
            scores = (torch.einsum("bsnd,btnd->bnst", q, k) * self.scale).masked_fill(~mask, -torch.inf)
            return torch.einsum("bnst,btnf->bsnf", scores.softmax(-1), v)
        is_e5m2 = recipe.fp8_format is library.Format.HYBRID
        casts = Casts(self.meta, torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)
        return Float8AttentionFn.apply(q, k, v, mask, self.scale, casts)

    def _ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each rank has two chunks of a sample, one from each end ("DualChunkSwap" of context_parallel.py)."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        k, v = (_in_order(_Gather.apply(x, self.cp_group).unbind()) for x in (k, v))
        chunk, outputs = q.shape[1] // 2, []
        for place, part in zip((rank, 2 * ranks - 1 - rank), q.split(chunk, dim=1), strict=True):
            end = (place + 1) * chunk
            rows = zip(part, k[:, :end], v[:, :end], strict=True)
            outputs.append(torch.stack([aligned_attention(*row, self.scale, True, (-1, 0), 0.0) for row in rows]))
        return torch.cat(outputs, dim=1)


class _Gather(torch.autograd.Function):
    """[...] -> [ranks, ...]; a rank's gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        total = dy.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    halves = [part.chunk(2, dim=1) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], dim=1)


def add_attention(layers: ModuleType) -> None:
    """Add the class to a module transformer_engine.pytorch."""
    layers.DotProductAttention = DotProductAttention
