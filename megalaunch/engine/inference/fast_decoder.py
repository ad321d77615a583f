"""A decoder on one device, optimised for generation: few operator calls per token, and matmuls for small batches.

It computes the same function as `Decoder`, from the same parameters. A token takes a few hundred small operations
between matmuls that read every weight once, so that on a CPU each saved call counts.
Shapes: B batch, S new positions, R rows B * S, H hidden, F features, N query heads, G key/value groups, D head dim,
W the rotated features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalaunch.engine.inference.kv_cache import KVCache, LayerKVCache
from megalaunch.engine.model.attention.attention import Attention
from megalaunch.engine.model.attention.core import AttentionFn
from megalaunch.engine.model.attention.score_mod import softcap
from megalaunch.engine.model.config import DecoderConfig, RopeConfig
from megalaunch.engine.model.decoder import Decoder, DecoderLayer
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.norm import Norm
from megalaunch.engine.model.rope import rope_cos_sin
from megalaunch.engine.model.sharded_norm import ShardedRMSNorm
from megalaunch.engine.model.tp_region import NO_TP


class _RopeCache(NamedTuple):
    """Cosines, and sines whose first half is negative, [S, W] or [B, 1, S, W].

    For one new position per row, the rotation is also a matrix [B, D, D]: one bmm rotates all heads.
    """

    cos: Tensor
    sin: Tensor
    matrix_BDD: Tensor | None


_BLOCK = 96  # output features per block of a small-batch matmul
_SMALL_BATCH = range(2, 25)  # rows for which blocks are faster: one reads the matrix once anyway, many repay its copy


class FusedLinear:
    """Linear layers that share their input, fused into one matmul. Their weights become views of the fused matrix.

    On a CPU a few rows are multiplied block by block, in one bmm: for a single large matmul MKL copies the matrix first
    (SmolLM2's matrices in fp32 times 8 rows on one thread: 62 ms instead of 110).
    """

    def __init__(self, *projections: Linear) -> None:
        self.sizes = [projection.weight.shape[0] for projection in projections]
        parts = [projection.weight.detach() for projection in projections]
        self._matrix_FH = parts[0] if len(parts) == 1 else torch.cat(parts)
        for projection, part in zip(projections, torch.split_with_sizes(self._matrix_FH, self.sizes), strict=True):
            projection.weight.data = part
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        self._bias_F = torch.cat(biases) if biases else None
        features, width = self._matrix_FH.shape
        self._matrix_HF, self._blocked = self._matrix_FH.t(), features - features % _BLOCK
        self._blocks_nHb = self._matrix_FH[: self._blocked].view(-1, _BLOCK, width).transpose(1, 2)
        self._few = _SMALL_BATCH if self._blocked and self._matrix_FH.device.type == "cpu" else range(0)

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Apply all projections, [R, H] -> [R, F]; their outputs are concatenated."""
        if x_RH.shape[0] in self._few:
            made = self._in_blocks(x_RH)
            return made if self._bias_F is None else made.add_(self._bias_F)
        if self._bias_F is None:
            return torch.mm(x_RH, self._matrix_HF)
        return torch.addmm(self._bias_F, x_RH, self._matrix_HF)

    def add_to(self, residual_RF: Tensor, x_RH: Tensor) -> Tensor:
        """Return `residual_RF` plus the projections of x."""
        if self._bias_F is None and residual_RF.dtype == x_RH.dtype and x_RH.shape[0] not in self._few:
            return torch.addmm(residual_RF, x_RH, self._matrix_HF)
        return residual_RF + self(x_RH)

    def _in_blocks(self, x_RH: Tensor) -> Tensor:
        blocks, rows = self._blocks_nHb.shape[0], x_RH.shape[0]
        made_RF = torch.bmm(x_RH.expand(blocks, -1, -1), self._blocks_nHb).transpose(0, 1).reshape(rows, self._blocked)
        if self._blocked == self._matrix_HF.shape[1]:
            return made_RF
        return torch.cat((made_RF, torch.mm(x_RH, self._matrix_HF[:, self._blocked :])), dim=1)


class FastDecoder:
    """The decoder for generation: token ids and KV caches -> logits of the next token."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.embedding is not None
        assert decoder.norm is not None
        assert decoder.head is not None
        with torch.no_grad():
            self._decoder, self._embedding, self._norm = (
                decoder,
                decoder.embedding,
                _SingleRowRMSNorm.from_norm(decoder.norm),
            )
            self._layers = [_layer(layer) for layer in decoder.layers.values()]
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
    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: KVCache) -> Tensor:
        """Run the tokens at `positions`, update the KV caches and return the last token's logits [B, 1, V]."""
        batch, num_tokens = tokens_BS.shape
        x_BSH, narrow = self._embedding.lookup(tokens_BS, positions, NO_TP), self._decoder.block_dtype
        windows = [layer.window for layer in self.config.layers]
        ropes = {layer.rope for layer in self.config.layers}
        width = self.config.attention.head_dim
        turns = {rope: _rope_for(positions, rope, x_BSH.dtype, batch, width) for rope in ropes}
        x_RH = (x_BSH if narrow is None else x_BSH.float()).flatten(0, 1)
        attends = stores.attention(num_tokens, windows)
        for number, (layer, config) in enumerate(zip(self._layers, self.config.layers, strict=True)):
            x_RH = layer(x_RH, batch, turns[config.rope], attends[number], stores[number])
        last_BH = x_RH if num_tokens == 1 else x_RH.view(batch, num_tokens, -1)[:, -1]
        logits_BV = self._head(self._norm(last_BH))
        cap = self.config.final_logit_softcapping
        return (logits_BV if cap is None else softcap(logits_BV, cap)).unsqueeze(1)


class _Layer:
    def __init__(self, layer: DecoderLayer) -> None:
        self._parallel = layer.parallel
        self._before, self._mlp_before = (
            _SingleRowRMSNorm.from_norm(layer.attention_norm),
            _SingleRowRMSNorm.from_norm(layer.mlp_norm),
        )
        self._after, self._mlp_after = layer.attention_out_norm, layer.mlp_out_norm
        self._attention, self._mlp = _Attention(layer.attention), _FeedForward(layer.mlp)

    def __call__(
        self, x_RH: Tensor, batch: int, turn: _RopeCache | None, attend: AttentionFn, store: LayerKVCache
    ) -> Tensor:
        attended = self._attention(self._before(x_RH), batch, turn, attend, store)
        between = _add_residual(x_RH, attended, self._attention.leave, self._after)
        entered = self._mlp(self._mlp_before(x_RH if self._parallel else between))
        return _add_residual(between, entered, self._mlp.leave, self._mlp_after)


def _add_residual(residual_RH: Tensor, x_RF: Tensor, leave: FusedLinear, norm: nn.Module) -> Tensor:
    return leave.add_to(residual_RH, x_RF) if isinstance(norm, nn.Identity) else residual_RH + norm(leave(x_RF))


class _SingleRowRMSNorm:
    """RMSNorm that normalises a single row on a CPU by three operator calls in place of torch's ten."""

    def __init__(self, norm: Norm) -> None:
        self._norm, self._weight_H = norm, norm.weight.detach()
        self._size, self._epsilon = norm.weight.shape[0], norm.config.epsilon

    @staticmethod
    def from_norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
        """Return the single-row form of an RMSNorm in fp32 on a CPU; return any other norm unchanged."""
        if not isinstance(norm, Norm) or norm.config.layer or norm.config.zero_centered_gamma:
            return norm
        here = norm.weight.dtype == torch.float32 and norm.weight.device.type == "cpu"
        return _SingleRowRMSNorm(norm) if here else norm

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Normalise [R, H] -> [R, H]."""
        if x_RH.shape[0] != 1:
            return self._norm(x_RH)
        x_H = x_RH[0]
        square = torch.dot(x_H, x_H).item() / self._size
        return torch.mul(x_RH, self._weight_H).mul_((square + self._epsilon) ** -0.5)


def _layer(layer: nn.Module) -> _Layer:
    assert isinstance(layer, DecoderLayer)
    return _Layer(layer)


class _FeedForward:
    def __init__(self, mlp: MLP) -> None:
        self._mlp = mlp
        self._enter = FusedLinear(mlp.up_proj) if mlp.gate_proj is None else FusedLinear(mlp.gate_proj, mlp.up_proj)
        self.leave = FusedLinear(mlp.down_proj)

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Return the input [R, F] of the down projection (`leave`)."""
        return self._mlp.activation(*torch.split_with_sizes(self._enter(x_RH), self._enter.sizes, dim=-1))


class _Attention:
    def __init__(self, attention: Attention) -> None:
        self._attention, config = attention, attention.config
        self._enter = FusedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.leave = FusedLinear(attention.o_proj)
        self._heads, self._groups, self._width = config.num_heads, config.num_groups, config.head_dim
        self._scoring = attention.scoring()

    def __call__(
        self, x_RH: Tensor, batch: int, turn: _RopeCache | None, attend: AttentionFn, store: LayerKVCache
    ) -> Tensor:
        """Update the KV cache; return attention's output [R, N D], the input of the output projection (`leave`)."""
        turned_heads, rows = self._heads + self._groups, x_RH.shape[0]
        projected = self._normed(self._enter(x_RH)).view(batch, -1, turned_heads + self._groups, self._width)
        qk_BnSD = heads_BnSD = projected.transpose(1, 2)
        if turn is not None and turn.matrix_BDD is not None:
            qk_BnSD = torch.bmm(projected[:, 0, :turned_heads], turn.matrix_BDD).unsqueeze(2)
        elif turn is not None:
            qk_BnSD = _apply_rope(heads_BnSD[:, :turned_heads], turn)
        k_BGTD, v_BGTD = store.extend(qk_BnSD[:, self._heads : turned_heads], heads_BnSD[:, turned_heads:])
        out_BNSD = attend(qk_BnSD[:, : self._heads], k_BGTD, v_BGTD, self._scoring)
        return out_BNSD.transpose(1, 2).reshape(rows, -1)

    def _normed(self, projected: Tensor) -> Tensor:
        """Apply QK norms, if there are any, to fused queries, keys and values, [R, F] -> [R, F]."""
        if self._attention.q_norm is None or self._attention.k_norm is None:
            return projected
        queries, keys, values = torch.split_with_sizes(projected, self._enter.sizes, dim=-1)
        normed = (self._of(self._attention.q_norm, queries), self._of(self._attention.k_norm, keys))
        return torch.cat((*normed, values), dim=-1)

    def _of(self, norm: nn.Module, features: Tensor) -> Tensor:
        if isinstance(norm, ShardedRMSNorm):
            return norm(features)
        return norm(features.view(features.shape[0], -1, self._width)).flatten(-2)


def _rope_for(
    positions: Tensor, rope: RopeConfig | None, dtype: torch.dtype, batch: int, width: int
) -> _RopeCache | None:
    if rope is None:
        return None
    cos, sin = rope_cos_sin(positions, rope, dtype)
    first, second = sin.chunk(2, dim=-1)
    turn = _RopeCache(cos, torch.cat((-first, second), dim=-1), None)
    if positions.shape[-1] != 1:
        return turn
    unit = torch.eye(width, dtype=dtype, device=positions.device).view(1, width, 1, width).expand(batch, -1, -1, -1)
    return turn._replace(matrix_BDD=_apply_rope(unit, turn).squeeze(2))  # rotate the rows of the identity as heads


def _apply_rope(heads: Tensor, turn: _RopeCache) -> Tensor:
    """Rotate as `model.rope.apply_rope`; a roll by W / 2 pairs i with i + W / 2, in both directions."""
    width = turn.cos.shape[-1]
    part = heads if width == heads.shape[-1] else heads[..., :width]
    new = torch.addcmul(part * turn.cos, part.roll(width // 2, -1), turn.sin)
    return new if width == heads.shape[-1] else torch.cat((new, heads[..., width:]), dim=-1)
