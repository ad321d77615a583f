"""A decoder on one device for generation: fused projections, and few operator calls per token.

It computes what `Decoder` computes, from the same parameters, norms, rotation, attention and activations; only the
order of the calls is its own. A token takes a few hundred small operations between matmuls that read every weight
once, so that on a CPU each saved call counts (docs/dev/decisions.md).
Shapes: B batch, S new positions, R rows B S, H hidden, F features, N query heads, G key/value groups, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalaunch.engine.inference.kv_cache import KVCache, LayerKVCache
from megalaunch.engine.model.attention.attention import Attention
from megalaunch.engine.model.attention.core import AttentionFn
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.decoder import Decoder, DecoderLayer
from megalaunch.engine.model.layers import Linear, ShardedRMSNorm
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.rope import RopeCache, apply_rope, rope_cos_sin
from megalaunch.engine.model.tp_region import NO_TP
from megalaunch.kernels.small_batch_linear import SmallBatchLinear


class FusedLinear(SmallBatchLinear):
    """Linear layers that share their input, fused into one. Their weights become views of the fused weight."""

    def __init__(self, *projections: Linear) -> None:
        self.sizes = [projection.weight.shape[0] for projection in projections]
        weights = [projection.weight.detach() for projection in projections]
        weight_FH = weights[0] if len(weights) == 1 else torch.cat(weights)
        for projection, weight in zip(projections, torch.split_with_sizes(weight_FH, self.sizes), strict=True):
            projection.weight.data = weight
        biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
        super().__init__(weight_FH, torch.cat(biases) if biases else None)


class FastDecoder:
    """The decoder for generation: token ids and KV caches -> logits of the next token."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.embedding is not None
        assert decoder.norm is not None
        assert decoder.head is not None
        self._decoder, self._embedding, self._norm = decoder, decoder.embedding, decoder.norm
        with torch.no_grad():
            self._layers = [_FastLayer(layer) for layer in decoder.layers.values()]
            self._head = FusedLinear(decoder.head)

    @property
    def config(self) -> DecoderConfig:
        """The decoder's config."""
        return self._decoder.config

    @property
    def device(self) -> torch.device:
        """The decoder's device."""
        return self._decoder.device

    @torch.inference_mode()
    def __call__(self, tokens_BS: Tensor, positions: Tensor, kv_cache: KVCache) -> Tensor:
        """Run the tokens at `positions`, update the KV caches and return the last token's logits [B, 1, V]."""
        batch, num_tokens = tokens_BS.shape
        x_BSH, block_dtype = self._embedding.lookup(tokens_BS, positions, NO_TP), self._decoder.block_dtype
        ropes = {layer.rope for layer in self.config.layers}
        rotations = {rope: rope_cos_sin(positions, rope, x_BSH.dtype) if rope else None for rope in ropes}
        attends = kv_cache.attention(num_tokens, [layer.window for layer in self.config.layers])
        x_RH = (x_BSH if block_dtype is None else x_BSH.float()).flatten(0, 1)
        for number, (layer, config) in enumerate(zip(self._layers, self.config.layers, strict=True)):
            x_RH = layer(x_RH, batch, rotations[config.rope], attends[number], kv_cache[number])
        last_BH = x_RH if num_tokens == 1 else x_RH.view(batch, num_tokens, -1)[:, -1]
        return self._decoder.softcap_logits(self._head(self._norm(last_BH))).unsqueeze(1)


class _FastLayer:
    """A layer, by fused projections; the last projection of each block adds to the residual stream."""

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, DecoderLayer)
        self._parallel = layer.parallel
        # Bound once: each lookup and each call of a module takes microseconds of Python.
        self._attention_norm, self._mlp_norm = layer.attention_norm.forward, layer.mlp_norm.forward
        self._attention_out_norm, self._mlp_out_norm = layer.attention_out_norm, layer.mlp_out_norm
        self._attention = _FastAttention(layer.attention)
        self._mlp = _FastMLP(layer.mlp) if isinstance(layer.mlp, MLP) else _FastMoE(layer.mlp)

    def __call__(
        self, x_RH: Tensor, batch: int, rotation: RopeCache | None, attend: AttentionFn, layer_cache: LayerKVCache
    ) -> Tensor:
        attended_RF = self._attention(self._attention_norm(x_RH), batch, rotation, attend, layer_cache)
        between_RH = _add_residual(x_RH, attended_RF, self._attention.o_proj, self._attention_out_norm)
        normed_RH = self._mlp_norm(x_RH if self._parallel else between_RH)
        return self._mlp.add_to(between_RH, normed_RH, self._mlp_out_norm)


def _add_residual(residual_RH: Tensor, x_RF: Tensor, projection: FusedLinear, norm: nn.Module) -> Tensor:
    if isinstance(norm, nn.Identity):
        return projection.add_to(residual_RH, x_RF)
    return residual_RH + norm(projection(x_RF))


class _FastMLP:
    def __init__(self, mlp: MLP) -> None:
        self._mlp = mlp
        self._up_proj = FusedLinear(mlp.up_proj) if mlp.gate_proj is None else FusedLinear(mlp.gate_proj, mlp.up_proj)
        self._down_proj = FusedLinear(mlp.down_proj)

    def add_to(self, residual_RH: Tensor, x_RH: Tensor, out_norm: nn.Module) -> Tensor:
        """Return the residual stream plus the block's normed output."""
        entered = torch.split_with_sizes(self._up_proj(x_RH), self._up_proj.sizes, dim=-1)
        return _add_residual(residual_RH, self._mlp.activation(*entered), self._down_proj, out_norm)


class _FastMoE:
    """A mixture of experts: few rows for each expert, so that nothing is gained by other forms of its matmuls."""

    def __init__(self, moe: MoELayer) -> None:
        self._moe = moe

    def add_to(self, residual_RH: Tensor, x_RH: Tensor, out_norm: nn.Module) -> Tensor:
        """Return the residual stream plus the block's normed output."""
        return residual_RH + out_norm(self._moe.feed_forward(x_RH[None])[0])


class _FastAttention:
    def __init__(self, attention: Attention) -> None:
        self._attention, config = attention, attention.config
        self._qkv_proj = FusedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = FusedLinear(attention.o_proj)
        self._heads, self._groups, self._head_dim = config.num_heads, config.num_groups, config.head_dim
        self._scoring = attention.scoring()

    def __call__(
        self, x_RH: Tensor, batch: int, rotation: RopeCache | None, attend: AttentionFn, layer_cache: LayerKVCache
    ) -> Tensor:
        """Update the KV cache; return attention's output [R, N D], the input of the output projection."""
        rotated, rows = self._heads + self._groups, x_RH.shape[0]
        projected = self._normed(self._qkv_proj(x_RH)).view(batch, -1, rotated + self._groups, self._head_dim)
        qk_BnSD = heads_BnSD = projected.transpose(1, 2)
        if rotation is not None:
            qk_BnSD = apply_rope(heads_BnSD[:, :rotated], rotation)
        k_BGTD, v_BGTD = layer_cache.update(qk_BnSD[:, self._heads : rotated], heads_BnSD[:, rotated:])
        out_BNSD = attend(qk_BnSD[:, : self._heads], k_BGTD, v_BGTD, self._scoring)
        return out_BNSD.transpose(1, 2).reshape(rows, -1)

    def _normed(self, projected: Tensor) -> Tensor:
        """Apply QK norms, if there are any, to fused queries, keys and values, [R, F] -> [R, F]."""
        if self._attention.q_norm is None or self._attention.k_norm is None:
            return projected
        queries, keys, values = torch.split_with_sizes(projected, self._qkv_proj.sizes, dim=-1)
        normed = (self._norm(self._attention.q_norm, queries), self._norm(self._attention.k_norm, keys))
        return torch.cat((*normed, values), dim=-1)

    def _norm(self, norm: nn.Module, features: Tensor) -> Tensor:
        if isinstance(norm, ShardedRMSNorm):
            return norm(features)
        return norm(features.view(features.shape[0], -1, self._head_dim)).flatten(-2)
