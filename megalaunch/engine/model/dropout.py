"""Dropout and jitter that are a function of (seed, sample, layer, site, position, feature), in every layout the same.

A mask is a hash of these numbers in wrapping 32-bit arithmetic. It is the same on every device, in a recomputed
forward pass and in the backward pass, which recomputes it, so that no mask is saved.

Shapes: B batch, s tokens of this rank between regions, H hidden, n query heads of this rank, L layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.config import DecoderConfig
from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.platform.host_copy import copy_to_device

_JITTER_SITES = 1 << 20  # the router of layer n has the site 2^20 + n, beyond those of dropout
_FIRST_FACTOR, _SECOND_FACTOR = -2048144789, -1028477387  # of MurmurHash3's finalizer
_SITES = 3  # of a layer: the output of attention, the output of the feed-forward block, attention weights


def sample_seeds(seed: int, samples: Sequence[int], device: torch.device) -> Tensor:
    """Return a random seed for each sample index of the training order, [B] int32; its tokens' masks depend on it."""
    digests = (hashlib.sha256(f"{seed}:dropout:{sample}".encode()).digest() for sample in samples)
    seeds = [int.from_bytes(digest[:4], "little", signed=True) for digest in digests]
    return copy_to_device(torch.tensor(seeds, dtype=torch.int32), device)


@dataclass(frozen=True)
class TokenPlaces:
    """Where this rank's tokens are in the samples of a microbatch.

    Attributes:
        positions: The position of each token in its sample, [s] or [B, s].
        rows: The sample of each token as an index into the microbatch, [B, s]; None: that of its row.
    """

    positions: Tensor
    rows: Tensor | None = None

    def hashes(self, seeds_XB: Tensor, tp_region: TPRegion) -> Tensor:
        """Return a hash of each token of this rank for seeds [..., B] of the samples, [..., B, s]."""
        seeds = seeds_XB[..., None] if self.rows is None else seeds_XB[..., tp_region.scatter_to_sp(self.rows)]
        return mix_seed(seeds, tp_region.scatter_to_sp(self.positions))


@dataclass(frozen=True)
class DropoutMask:
    """Dropout at one site, given by a hash for each token [B, s] and each feature [H]."""

    token_hashes: Tensor
    feature_hashes: Tensor
    rate: float

    def __call__(self, x_BsH: Tensor) -> Tensor:
        """Zero elements with probability `rate`, and divide the others by 1 - rate."""
        return apply_function(_Drop, x_BsH, self.token_hashes, self.feature_hashes, self.rate)


@dataclass(frozen=True)
class RouterJitter:
    """Noise on the input of one router, given by a hash for each token [B, s] and each feature [H]."""

    token_hashes: Tensor
    feature_hashes: Tensor
    size: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        """Multiply each element by a number from 1 - size to 1 + size."""
        return apply_function(_Jitter, x_TH, self.token_hashes.flatten(), self.feature_hashes, self.size)


@dataclass(frozen=True)
class LayerDropoutMasks:
    """Dropout in one layer: of both blocks' outputs, and the seeds [B, n] for dropout of attention weights.

    `router_jitter` is the noise on its router's input.
    """

    attention_output: DropoutMask | None = None
    mlp_output: DropoutMask | None = None
    attention_seeds: Tensor | None = None
    router_jitter: RouterJitter | None = None


NO_DROPOUT = LayerDropoutMasks()


@dataclass(frozen=True)
class DropoutMasks:
    """Dropout in a forward pass: of the embedding's output, and in each layer by name."""

    embedding: DropoutMask | None
    layers: Mapping[str, LayerDropoutMasks]


def no_dropout(names: Iterable[str]) -> DropoutMasks:
    """Return masks that drop nothing, for evaluation."""
    return DropoutMasks(None, dict.fromkeys(names, NO_DROPOUT))


def make_dropout_masks(
    config: DecoderConfig, tp_region: TPRegion, seeds_B: Tensor, places: TokenPlaces, names: Sequence[str]
) -> DropoutMasks:
    """Return the dropout masks of the layers `names`.

    Args:
        config: The decoder's config, with the dropout rates.
        tp_region: Shards positions (sequence parallelism) and heads over tensor-parallel ranks.
        seeds_B: The samples' seeds (`sample_seeds`).
        places: Of this rank's tokens, inside a tensor-parallel region.
        names: Names of layers, which are their global indices.
    """
    if not config.needs_seeds:
        return no_dropout(names)
    sites = torch.tensor([0, *(_SITES * int(name) + site for name in names for site in range(1, _SITES + 1))])
    seeds = mix_seed(seeds_B, copy_to_device(sites, seeds_B.device)[:, None])  # one seed for each site and sample
    attention, mlp, attention_weights = seeds[1:].view(-1, _SITES, len(seeds_B)).unbind(1)  # [L, B] each
    dropout_masks: list[tuple[DropoutMask | None, DropoutMask | None]] = [(None, None)] * len(names)
    embedding = None
    if config.hidden_dropout or config.embedding_dropout:
        feature_hashes = hash_ids(torch.arange(config.hidden_size, device=seeds_B.device))
        token_hashes = places.hashes(torch.cat((seeds[:1], attention, mlp)), tp_region)
        first, *rest = token_hashes.unbind()
        embedding = DropoutMask(first, feature_hashes, config.embedding_dropout) if config.embedding_dropout else None
        each = [
            DropoutMask(hashes, feature_hashes, config.hidden_dropout) if config.hidden_dropout else None
            for hashes in rest
        ]
        dropout_masks = list(zip(each[: len(names)], each[len(names) :], strict=True))
    heads: Sequence[Tensor | None] = [None] * len(names)
    if config.attention.dropout:
        mine = tp_region.local_heads(torch.arange(config.attention.num_heads, device=seeds_B.device))
        heads = mix_seed(attention_weights[..., None], mine).unbind()
    jitters = _router_jitters(config, tp_region, seeds_B, places, names)
    layers = {
        name: LayerDropoutMasks(*pair, head, jitter)
        for name, pair, head, jitter in zip(names, dropout_masks, heads, jitters, strict=True)
    }
    return DropoutMasks(embedding, layers)


def _router_jitters(
    config: DecoderConfig, tp_region: TPRegion, seeds_B: Tensor, places: TokenPlaces, names: Sequence[str]
) -> Sequence[RouterJitter | None]:
    """Return the jitter of each layer's router, with the arguments of `make_dropout_masks`."""
    if config.moe is None or not config.moe.input_jitter:
        return [None] * len(names)
    sites = torch.tensor([_JITTER_SITES + int(name) for name in names])
    seeds_LB = mix_seed(seeds_B, copy_to_device(sites, seeds_B.device)[:, None])
    token_hashes = places.hashes(seeds_LB, tp_region)
    feature_hashes = hash_ids(torch.arange(config.hidden_size, device=seeds_B.device))
    return [RouterJitter(hashes, feature_hashes, config.moe.input_jitter) for hashes in token_hashes.unbind()]


def maybe_dropout(x_BsH: Tensor, drop: DropoutMask | None) -> Tensor:
    """Apply the dropout, if there is any."""
    return x_BsH if drop is None else drop(x_BsH)


class _Drop(torch.autograd.Function):
    """y = x * mask / (1 - rate). Backward: dx = dy * mask / (1 - rate), with the mask recomputed from its hashes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_hashes: Tensor, feature_hashes: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(token_hashes, feature_hashes)
        ctx.rate = rate
        return x.mul(keep_mask(token_hashes, feature_hashes, rate)).mul_(1 / (1 - rate))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        token_hashes, feature_hashes = ctx.saved_tensors
        keep = keep_mask(token_hashes, feature_hashes, ctx.rate)
        return gradients[0].mul(keep).mul_(1 / (1 - ctx.rate)), None, None, None


class _Jitter(torch.autograd.Function):
    """y = x (1 + size u), u from -1 to 1. Backward: dx = dy (1 + size u), with u recomputed from its hashes."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_hashes: Tensor, feature_hashes: Tensor, size: float) -> Tensor:
        ctx.save_for_backward(token_hashes, feature_hashes)
        ctx.size = size
        return x_TH * jitter_factors(token_hashes, feature_hashes, size).to(x_TH.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        token_hashes, feature_hashes = ctx.saved_tensors
        factors = jitter_factors(token_hashes, feature_hashes, ctx.size)
        return gradients[0] * factors.to(gradients[0].dtype), None, None, None


def jitter_factors(rows: Tensor, columns: Tensor, size: float) -> Tensor:
    """Return factors from 1 - size to 1 + size, fp32 [..., C], of hashed rows [...] and columns [C]."""
    return hash_elements(rows, columns).float().mul_(size / 2**31).add_(1)


def keep_mask(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return the keep mask, bool [..., C], of hashed rows [...] and columns [C]: False with probability `rate`."""
    return hash_elements(rows, columns) >= _least_kept(rate)


def keeps(row: Tensor, column: Tensor, rate: float) -> Tensor:
    """Return the element of `keep_mask` of one hashed row and column, for a kernel that is generated from it."""
    seed = (row ^ column) * _FIRST_FACTOR
    return (seed ^ ((seed >> 15) & 0x1FFFF)) * _SECOND_FACTOR >= _least_kept(rate)


def _least_kept(rate: float) -> int:
    """Return the least hash of an element that is kept."""
    # A compiler may cancel a factor in a comparison with 0; with 1 it may not.
    return round(rate * 2**32) - 2**31 or 1


def hash_elements(rows: Tensor, columns: Tensor) -> Tensor:
    """Return a hash of each element, int32 [..., C], of hashed rows [...] and columns [C].

    It is its row's xor its column's, mixed by two multiplications (as in MurmurHash3, Appleby).
    """
    seeds = rows.unsqueeze(-1) ^ columns
    seeds.mul_(_FIRST_FACTOR)
    seeds ^= (seeds >> 15).bitwise_and_(0x1FFFF)
    return seeds.mul_(_SECOND_FACTOR)


def mix_seed(seeds: Tensor, numbers: Tensor) -> Tensor:
    """Hash each seed with each number (from 0), broadcast."""
    return mix_hash(seeds, hash_ids(numbers))


def mix_hash(seeds: Tensor, hashes: Tensor) -> Tensor:
    """Hash each seed with each number of which `hash_ids` is given, broadcast."""
    return _mix(seeds ^ hashes)


def hash_ids(numbers: Tensor) -> Tensor:
    """Hash numbers from 0 to int32."""
    return _mix(numbers.to(torch.int32) + 0x1E3779B9)


def _mix(seeds: Tensor) -> Tensor:
    """Apply MurmurHash3's finalizer: each output bit depends on every input bit."""
    seeds = (seeds ^ ((seeds >> 16) & 0xFFFF)) * _FIRST_FACTOR
    seeds = (seeds ^ ((seeds >> 13) & 0x7FFFF)) * _SECOND_FACTOR
    return seeds ^ ((seeds >> 16) & 0xFFFF)
