"""A decoder on one device, arranged to write text: few calls a token, and weights that lie as small batches want them.

It computes what `Decoder` computes, from the same parameters. A token is a few hundred small operations between
matmuls that read every weight once, so that on processors each call saved counts.
Shapes: B batch, S new positions, R rows B * S, H hidden, F features, N query heads, G key/value groups, D head dim,
W the rotated width of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalaunch.engine.inference.cache import LayerCache, TextCache
from megalaunch.engine.model.attention import Attention
from megalaunch.engine.model.boundary import ONE_DEVICE
from megalaunch.engine.model.config import DecoderConfig, RopeConfig
from megalaunch.engine.model.context import Attend
from megalaunch.engine.model.decoder import Decoder, DecoderLayer
from megalaunch.engine.model.features_norm import FeaturesNorm
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.model.rope import rotation_of
from megalaunch.engine.model.scores import capped


class _Turn(NamedTuple):
    """Cosines, and sines whose first half is negative, [S, W] or [B, 1, S, W]."""

    cos: Tensor
    sin: Tensor


class Joined:
    """Projections of one input as one matmul; their parameters become views of its matrix.

    It lies input by input: a matmul with a few rows takes 0.7 of the time that it takes on [out, in] (8 rows, fp32).
    """

    def __init__(self, *projections: Linear) -> None:
        self.sizes = [projection.weight.shape[0] for projection in projections]
        self._matrix_HF = torch.cat([p.weight.detach() for p in projections]).t().contiguous()
        for projection, part in zip(
            projections, torch.split_with_sizes(self._matrix_HF, self.sizes, dim=1), strict=True
        ):
            projection.weight.data = part.t()
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        self._bias_F = torch.cat(biases) if biases else None

    def __call__(self, x_RH: Tensor) -> Tensor:
        """[R, H] -> [R, F], one projection after the other."""
        return (
            torch.mm(x_RH, self._matrix_HF)
            if self._bias_F is None
            else torch.addmm(self._bias_F, x_RH, self._matrix_HF)
        )


class LeanDecoder:
    """Tokens and a cache -> logits of what comes next."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.embedding is not None
        assert decoder.norm is not None
        assert decoder.head is not None
        with torch.no_grad():
            self._decoder, self._embedding, self._norm = decoder, decoder.embedding, decoder.norm
            self._layers = [_layer(layer) for layer in decoder.layers.values()]
            self._head = Joined(decoder.head)

    @property
    def config(self) -> DecoderConfig:
        """The decoder's."""
        return self._decoder.config

    @property
    def device(self) -> torch.device:
        """The decoder's."""
        return self._decoder.device

    @torch.inference_mode()
    def __call__(self, tokens_BS: Tensor, positions: Tensor, stores: TextCache) -> Tensor:
        """Logits [B, 1, V] after the last of these tokens."""
        batch, held = tokens_BS.shape
        x_BSH, narrow = self._embedding.vectors(tokens_BS, positions, ONE_DEVICE), self._decoder.narrow
        windows = [layer.window for layer in self.config.layers]
        turns = {rope: _turn(positions, rope, x_BSH.dtype) for rope in {layer.rope for layer in self.config.layers}}
        x_RH = (x_BSH if narrow is None else x_BSH.float()).flatten(0, 1)
        attends = stores.attention(held, windows)
        for number, (layer, config) in enumerate(zip(self._layers, self.config.layers, strict=True)):
            x_RH = layer(x_RH, batch, turns[config.rope], attends[number], stores[number])
        last_BH = x_RH if held == 1 else x_RH.view(batch, held, -1)[:, -1]
        logits_BV = self._head(self._norm(last_BH))
        cap = self.config.logit_soft_cap
        return (logits_BV if cap is None else capped(logits_BV, cap)).unsqueeze(1)


class _Layer:
    def __init__(self, layer: DecoderLayer) -> None:
        self._parallel = layer.parallel
        self._norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
        self._attention, self._mlp = _Attention(layer.attention), _FeedForward(layer.mlp)

    def __call__(self, x_RH: Tensor, batch: int, turn: _Turn | None, attend: Attend, store: LayerCache) -> Tensor:
        before, after, mlp_before, mlp_after = self._norms
        between = x_RH + after(self._attention(before(x_RH), batch, turn, attend, store))
        return between + mlp_after(self._mlp(mlp_before(x_RH if self._parallel else between)))


def _layer(layer: nn.Module) -> _Layer:
    assert isinstance(layer, DecoderLayer)
    return _Layer(layer)


class _FeedForward:
    def __init__(self, mlp: MLP) -> None:
        self._mlp = mlp
        self._enter = Joined(mlp.up_proj) if mlp.gate_proj is None else Joined(mlp.gate_proj, mlp.up_proj)
        self._leave = Joined(mlp.down_proj)

    def __call__(self, x_RH: Tensor) -> Tensor:
        entered = self._enter(x_RH)
        return self._leave(self._mlp.activate(*torch.split_with_sizes(entered, self._enter.sizes, dim=-1)))


class _Attention:
    def __init__(self, attention: Attention) -> None:
        self._attention, config = attention, attention.config
        self._enter = Joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._leave = Joined(attention.o_proj)
        self._heads, self._groups, self._width = config.num_heads, config.num_groups, config.head_dim

    def __call__(self, x_RH: Tensor, batch: int, turn: _Turn | None, attend: Attend, store: LayerCache) -> Tensor:
        projected = self._enter(x_RH)
        turned_heads = self._heads + self._groups
        heads_BnSD = self._normed(projected).view(batch, -1, turned_heads + self._groups, self._width).transpose(1, 2)
        qk_BnSD = heads_BnSD.narrow(1, 0, turned_heads)
        if turn is not None:
            qk_BnSD = _turned(qk_BnSD, turn)
        k_BGTD, v_BGTD = store.extend(
            qk_BnSD.narrow(1, self._heads, self._groups), heads_BnSD.narrow(1, turned_heads, self._groups)
        )
        out_BNSD = self._attention.core(attend, qk_BnSD.narrow(1, 0, self._heads), k_BGTD, v_BGTD)
        return self._leave(out_BNSD.transpose(1, 2).reshape(x_RH.shape[0], -1))

    def _normed(self, projected: Tensor) -> Tensor:
        """[R, F] -> [R, F], queries and keys normed where they are."""
        if self._attention.q_norm is None or self._attention.k_norm is None:
            return projected
        queries, keys, values = torch.split_with_sizes(projected, self._enter.sizes, dim=-1)
        normed = (self._of(self._attention.q_norm, queries), self._of(self._attention.k_norm, keys))
        return torch.cat((*normed, values), dim=-1)

    def _of(self, norm: nn.Module, features: Tensor) -> Tensor:
        if isinstance(norm, FeaturesNorm):
            return norm(features)
        return norm(features.view(features.shape[0], -1, self._width)).flatten(-2)


def _turn(positions: Tensor, rope: RopeConfig | None, dtype: torch.dtype) -> _Turn | None:
    if rope is None:
        return None
    cos, sin = rotation_of(positions, rope, dtype)
    first, second = sin.chunk(2, dim=-1)
    return _Turn(cos, torch.cat((-first, second), dim=-1))


def _turned(heads: Tensor, turn: _Turn) -> Tensor:
    """The rotation of `model.rope.rotate`: the other number of a pair stands half a width away, either way round."""
    width = turn.cos.shape[-1]
    part = heads if width == heads.shape[-1] else heads[..., :width]
    new = torch.addcmul(part * turn.cos, part.roll(width // 2, -1), turn.sin)
    return new if width == heads.shape[-1] else torch.cat((new, heads[..., width:]), dim=-1)
