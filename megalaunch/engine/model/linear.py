"""The linear layer, whose layout says whether its outputs or its inputs are sharded over tensor-parallel ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from megalaunch.engine.param_layout import REPLICATED, ParamLayout, local_param
from megalaunch.kernels.linear_matmuls import COMPUTE_DTYPE, LinearMatmuls, linear_by


class CastsWeights(Protocol):
    """A layer of a library that keeps what it computes from weights."""

    def forget_weights(self) -> None:
        """Drop what was computed from the weights: they have changed."""


class LibraryLayer(CastsWeights, Protocol):
    """A layer of a library that computes a linear layer, and those that share its input, with their collectives.

    It may compute the norm of this input too. Projections that it does not compute need `normalize_input` before them.

    Attributes:
        sequence_parallel: Its input or output is sharded along the sequence outside a tensor-parallel region.
    """

    sequence_parallel: bool

    def accepts(self, x: Tensor) -> bool:
        """Return whether it can compute this input."""

    def normalize_input(self, x: Tensor) -> Tensor:
        """Return the norm of x, if the layer computes it with the projections, else x."""

    def __call__(self, x: Tensor, *weights_FH: Tensor) -> tuple[Tensor, ...]:
        """Return x W^T for each weight, or norm(x) W^T."""


class Linear(nn.Module):
    """x -> x W^T (+ b); `weight` is [out, in] as in torch.

    Column parallel (outputs sharded): the bias is sharded with the outputs. Row parallel (inputs sharded): the bias is
    replicated, and every rank adds it after the sum over ranks. `matmuls` computes its products, in fp8 for instance,
    unless there is a `library` layer that accepts its input.
    """

    def __init__(self, in_features: int, out_features: int, layout: ParamLayout, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.matmuls: LinearMatmuls = COMPUTE_DTYPE
        self.library: LibraryLayer | None = None
        self.layout = layout
        self.bias_layout = layout if layout.shard_dim == 0 else REPLICATED

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer on one device that holds the whole weight: [..., in] -> [..., out]."""
        bias = None if self.bias is None else local_param(self.bias)
        weight = local_param(self.weight)
        if self.library is not None and self.library.accepts(x):
            (y,) = self.library(x, weight)
            return y if bias is None else y + bias
        return linear_by(self.matmuls, x, weight, bias)
