"""Grouped-query self-attention.

Shapes: B batch, S queries, s a rank's shard of them outside a tensor-parallel region, T keys, H hidden, N query heads,
G key/value groups, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megalaunch.engine.model.attention.score_mod import AttentionFn, ScoreMod
from megalaunch.engine.model.config import AttentionConfig, NormConfig
from megalaunch.engine.model.layers import Norm, SavePolicy, ShardedRMSNorm, save_activations
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.rope import RopeCache, apply_rope_to_both
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, REPLICATED_PER_HEAD, ROW_PARALLEL, ParamLayout, local_param
from megalaunch.engine.precision.transformer_engine_attention import Float8Attention
from megalaunch.kernels.overridable import overridable


class LayerKVCache(Protocol):
    """The KV cache of one layer, for generation: what its attention keeps of earlier positions.

    The kind of attention decides what that is: keys and values here.
    """

    def update(self, *states: Tensor) -> Sequence[Tensor]:
        """Append states [B, G, S, ...] of new positions; return those of all positions, [B, G, T, ...]."""


class KVCache(Protocol):
    """The KV caches of all layers, which also make the attention masks of a batch in generation."""

    def __getitem__(self, layer: int, /) -> LayerKVCache: ...

    def attention(self, num_tokens: int, windows: Sequence[int | None]) -> Sequence[AttentionFn]:
        """Return each layer's attention of the last `num_tokens` positions; `windows`: sliding windows (None: full)."""


class SelfAttention(nn.Module):
    """What all kinds of self-attention share: core attention with its score modification and its save policy."""

    def __init__(self, config: AttentionConfig, tp_region: TPRegion) -> None:
        super().__init__()
        self.config, self.tp_region = config, tp_region
        self.core_save_policy: SavePolicy = save_activations
        self.sinks: nn.Parameter | None = None
        self.float8: Float8Attention | None = None

    @overridable
    def core_attention(
        self, attend: AttentionFn, queries: Tensor, keys: Tensor, values: Tensor, seeds_BN: Tensor | None = None
    ) -> Tensor:
        """Compute core attention, between the projections, as a function that the save policy may call again."""
        return attend(queries, keys, values, self.scoring(seeds_BN))

    def scoring(self, seeds_BN: Tensor | None = None) -> ScoreMod:
        """Return the score modification: scale, soft cap, sinks, dropout and casts."""
        sinks, config = None if self.sinks is None else local_param(self.sinks), self.config
        return ScoreMod(config.softmax_scale, config.soft_cap, sinks, seeds_BN, config.dropout, self.float8)


@overridable
class Attention(SelfAttention):
    """Causal grouped-query attention: each of the G key/value heads serves N / G query heads.

    With an output gate, o_proj gets out * sigmoid(x W_gate^T), elementwise (Qiu et al. 2025, arXiv:2505.06708).
    """

    sinks_layout = COLUMN_PARALLEL

    def __init__(
        self, hidden_size: int, config: AttentionConfig, norm: NormConfig, tp_region: TPRegion = NO_TP
    ) -> None:
        super().__init__(config, tp_region)
        groups = ParamLayout(shard_dim=0, max_shards=config.num_groups)
        queries, keys = config.num_heads * config.head_dim, config.num_groups * config.head_dim
        self.q_proj = Linear(hidden_size, queries, COLUMN_PARALLEL, config.qkv_bias)
        self.k_proj = Linear(hidden_size, keys, groups, config.qkv_bias)
        self.v_proj = Linear(hidden_size, keys, groups, config.qkv_bias)
        self.gate_proj = Linear(hidden_size, queries, COLUMN_PARALLEL, config.qkv_bias) if config.output_gate else None
        self.o_proj = Linear(queries, hidden_size, ROW_PARALLEL, config.output_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm == "head":
            self.q_norm = Norm(config.head_dim, norm, REPLICATED_PER_HEAD)
            self.k_norm = Norm(config.head_dim, norm, REPLICATED_PER_HEAD)
        elif config.qk_norm == "full":
            self.q_norm = ShardedRMSNorm(queries, norm, COLUMN_PARALLEL, tp_region)
            self.k_norm = ShardedRMSNorm(keys, norm, groups, tp_region)

    @property
    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """The projections, those that share an input as one group (`ProjectionBlock`)."""
        entries = (self.q_proj, self.k_proj, self.v_proj)
        return (entries if self.gate_proj is None else (*entries, self.gate_proj)), (self.o_proj,)

    def forward(
        self,
        x_BSH: Tensor,
        rotation: RopeCache | None,
        attend: AttentionFn,
        layer_cache: LayerKVCache | None = None,
        seeds_BN: Tensor | None = None,
    ) -> Tensor:
        """Apply attention and its projections, [B, s, H] -> [B, s, H].

        Args:
            x_BSH: The normed input.
            rotation: Cosines and sines of the position ids; None: no RoPE.
            attend: Core attention, with its mask.
            layer_cache: The KV cache, for generation: it is updated, and queries also attend to the earlier positions.
            seeds_BN: Dropout seeds of this rank's heads; None: no attention weight is dropped.
        """
        entries, _ = self.projection_groups
        queries, keys, values, *gate = self.tp_region.column_parallel_linear(x_BSH, *entries)
        q_BNSD, k_BGTD = self._normed(queries, self.q_norm), self._normed(keys, self.k_norm)
        if rotation is not None:
            q_BNSD, k_BGTD = apply_rope_to_both(q_BNSD, k_BGTD, rotation)
        v_BGTD = self._heads(values)
        if layer_cache is not None:
            k_BGTD, v_BGTD = layer_cache.update(k_BGTD, v_BGTD)
        core = self.gated_core_attention if gate else self.core_attention
        out_BNSD = self.core_save_policy(core, attend, q_BNSD, k_BGTD, v_BGTD, seeds_BN, *gate)
        return self.tp_region.row_parallel_linear(out_BNSD.transpose(1, 2).flatten(2), self.o_proj)

    def gated_core_attention(
        self,
        attend: AttentionFn,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        seeds_BN: Tensor | None,
        gate_BSF: Tensor,
    ) -> Tensor:
        """Compute core attention and gate its output, as a function that the save policy may call again."""
        out_BNSD = self.core_attention(attend, queries, keys, values, seeds_BN)
        return out_BNSD * self._heads(gate_BSF).sigmoid()

    def _normed(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """Split into heads, [B, S, f] -> [B, n, S, D], normed per head or over all heads together."""
        if isinstance(norm, ShardedRMSNorm):
            return self._heads(norm(projected))
        heads = self._heads(projected)
        return heads if norm is None else norm(heads)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.config.head_dim).transpose(1, 2)
