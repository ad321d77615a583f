"""The embedding and the norms of the decoder, and how activations get from a forward to its backward pass.

Each module declares as a `ParamLayout` how its parameters are sharded over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megalaunch.engine.model.config import NormConfig
from megalaunch.engine.model.tp_region import NoTP, TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, REPLICATED, ParamLayout, local_param
from megalaunch.engine.torch_private import has_hooks
from megalaunch.kernels.add_norm import add_norm, fuses_add_norm
from megalaunch.kernels.layer_norm import layer_norm
from megalaunch.kernels.overridable import is_overridden, overridable, target_name
from megalaunch.kernels.rms_norm import rms_norm, rms_norm_sharded

Output = TypeVar("Output", bound=Tensor | tuple[Tensor, ...])


Contexts = Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]
"""Returns a context for the forward pass of a function, and one for its recomputation."""


class SavePolicy(Protocol):
    """How the activations of a function get to its backward pass: saved by autograd, recomputed or offloaded.

    A module calls the function through its policy, which `parallel/activation_checkpoint.py` and
    `parallel/activation_offload.py` set.
    """

    def __call__(self, function: Callable[..., Output], /, *inputs: Any) -> Output:
        """Call the function with its inputs and return its output."""


def save_activations(function: Callable[..., Output], /, *inputs: Any) -> Output:
    """Call the function; autograd saves its activations (the default `SavePolicy`)."""
    return function(*inputs)


class Embedding(nn.Module):
    """Token embedding `weight` [V, H], sharded by row, and `positions` [P, H] where positions are learned.

    Tokens are looked up by the `TPRegion`, since a rank may hold only a shard of the vocabulary.
    """

    layout = COLUMN_PARALLEL
    positions_layout = REPLICATED

    def __init__(self, vocab_size: int, hidden_size: int, positions: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.positions = None if positions is None else nn.Parameter(torch.empty(positions, hidden_size))

    def lookup(self, tokens_BS: Tensor, positions: Tensor, tp_region: TPRegion) -> Tensor:
        """Embed token ids [B, S] at position ids [S] or [B, S] -> [B, s, H]."""
        x_BsH = tp_region.embed(tokens_BS, self)
        if self.scale != 1:
            x_BsH = x_BsH * torch.tensor(self.scale, dtype=x_BsH.dtype)
        if self.positions is None:
            return x_BsH
        return x_BsH + nn.functional.embedding(tp_region.scatter_to_sp(positions), local_param(self.positions))


class LibraryNorm(Protocol):
    """A norm of a library, with the settings of a `Norm`, which gives it inputs in the dtype of the weight."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise [..., size] -> [..., size]; statistics, and 1 + weight of a zero-centered one, are fp32."""


@overridable
class Norm(nn.Module):
    """RMSNorm: x / rms(x) * weight (Zhang and Sennrich, 2019), or LayerNorm with its bias (Ba et al., 2016).

    A `library` norm computes it where the residual stream has the dtype of the weight. A norm `in_projections` returns
    its input: the tensor-parallel region computes it with the projections that follow (`LibraryLayer`).
    """

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout = REPLICATED) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.save_policy: SavePolicy = save_activations
        self.library: LibraryNorm | None = None
        self.in_projections = False
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if config.layer else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size] -> [..., size] in the weight's dtype; statistics are fp32 whatever the dtype of x."""
        return x if self.in_projections else self.save_policy(self.normalize, x)

    @overridable
    def normalize(self, x: Tensor) -> Tensor:
        """Normalise, as a function that the save policy may call again."""
        weight, epsilon = local_param(self.weight), self.config.epsilon
        bias = None if self.bias is None else local_param(self.bias)
        dtype = weight.dtype
        if self.library is not None and x.dtype == dtype:
            return self.library(x, weight, bias)
        if self.config.zero_centered_gamma:  # in 16 bits, 1 + weight would lose most of a small weight
            x, weight = x.float(), 1 + weight.float()
        elif x.dtype != dtype:  # x is a residual stream in fp32
            weight = weight.to(x.dtype)
        if bias is None:
            normed = rms_norm(x, weight, epsilon)
        else:
            normed = layer_norm(x, weight, bias.to(x.dtype), epsilon)
        return normed if normed.dtype == dtype else normed.to(dtype)

    def fuses_addition(self, x: Tensor) -> bool:
        """Return whether `add_and_normalize` computes for `x` what a call of the module would, in fewer passes.

        Not if a save policy, hooks or an override have to see the norm alone.
        """
        return (
            type(self) is Norm
            and self.save_policy is save_activations
            and not has_hooks(self)
            and not is_overridden(_NORMALIZE, x)
            and fuses_add_norm(x, self.bias)
        )

    def add_and_normalize(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + update, and its norm in the weight's dtype."""
        weight = local_param(self.weight)
        bias, dtype = None if self.bias is None else local_param(self.bias), weight.dtype
        if self.config.zero_centered_gamma:
            weight = 1 + weight.float()
        return add_norm(x, update, weight, bias, self.config.epsilon, dtype)


_NORMALIZE = target_name(Norm.normalize)


def add_and_normalize(x: Tensor, update: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return x + update, and its norm by any module; together where the norm can."""
    if isinstance(norm, Norm) and norm.fuses_addition(x):
        return norm.add_and_normalize(x, update)
    total = x + update
    return total, norm(total)


class ShardedRMSNorm(Norm):
    """RMSNorm, or LayerNorm, inside a tensor-parallel region.

    Every rank has an equal shard of the features, so that the mean over all features is the mean of the ranks' means:
    one all-reduce of [B, S, 1] for the variance, and one for the mean of a LayerNorm.
    """

    def __init__(self, size: int, config: NormConfig, layout: ParamLayout, tp_region: TPRegion) -> None:
        super().__init__(size, config, layout)
        self.tp_region = tp_region

    def normalize(self, x: Tensor) -> Tensor:
        """Normalise [B, S, f] -> [B, S, f], computed in fp32."""
        if isinstance(self.tp_region, NoTP):
            return super().normalize(x)
        weight = self.tp_region.local_param(self.weight, self.layout)
        if self.config.zero_centered_gamma:
            weight = 1 + weight.float()
        if not (self.config.layer or torch.compiler.is_compiling()):  # the compiler itself saves little
            return rms_norm_sharded(x, weight, self.config.epsilon, self.tp_region.all_reduce_mean)
        wide = x.float()
        if self.config.layer:
            wide = wide - self.tp_region.all_reduce_mean(wide.mean(-1, keepdim=True))
        variance = self.tp_region.all_reduce_mean(wide.square().mean(-1, keepdim=True))
        normed = wide * (variance + self.config.epsilon).rsqrt() * weight
        return (normed if self.bias is None else normed + self.tp_region.local_param(self.bias, self.layout)).to(
            x.dtype
        )
