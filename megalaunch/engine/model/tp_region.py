"""Where tensor-parallel regions begin and end: what a block calls, and the one-device form of it.

Shapes: B batch, S sequence, s the part of it that a rank holds between regions (S without sequence parallelism),
H hidden, F features, V vocabulary; f and v are a rank's part of F and V.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.param_layout import ParamLayout, local_param


class TPRegion(Protocol):
    """The places where activations change hands; the identity where one device holds all."""

    @property
    def vocab_axis(self) -> Axis:
        """The axis that divides the logits."""

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """Token ids [B, S] -> [B, s, H]."""

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """All projections of the same input: [B, s, H] -> [B, S, f] each."""

    def gather_from_sequence_parallel_region(self, x_BsH: Tensor) -> Tensor:
        """The input of a region whose work on it is not a projection alone: [B, s, H] -> [B, S, H]."""

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """Project and sum over ranks: [B, S, f] -> [B, s, H]."""

    def local_seq_len(self, length: int) -> int:
        """s for S = `length`."""

    def sequence_parallel_disabled(self) -> AbstractContextManager[None]:
        """Within it s is S, whatever S is: for text that grows by a token at a time."""

    def local_param(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """What this rank applies of a parameter, inside a region."""

    def scatter_to_sp(self, positions: Tensor) -> Tensor:
        """Of [..., S] what goes with this rank's tokens between regions, [..., s]."""

    def local_heads(self, whole: Tensor) -> Tensor:
        """Of [N] what goes with this rank's heads inside a region, [n]."""

    def all_reduce_mean(self, statistic: Tensor) -> Tensor:
        """Inside a region: the mean over ranks of what each found of its part of the features."""


class NoTP:
    """No region at all."""

    vocab_axis = Axis("tp")

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """[B, S] -> [B, S, H]."""
        assert isinstance(embedding.weight, Tensor)
        return F.embedding(tokens_BS, local_param(embedding.weight))

    def column_parallel_linear(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """[B, S, H] -> [B, S, F] each."""
        return tuple(projection(x_BsH) for projection in projections)

    def gather_from_sequence_parallel_region(self, x_BsH: Tensor) -> Tensor:
        """It is whole."""
        return x_BsH

    def row_parallel_linear(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """[B, S, F] -> [B, S, H]."""
        result: Tensor = projection(x_BSf)
        return result

    def local_seq_len(self, length: int) -> int:
        """All of them."""
        return length

    def sequence_parallel_disabled(self) -> AbstractContextManager[None]:
        """As ever."""
        return nullcontext()

    def local_param(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """All of it."""
        return local_param(parameter)

    def scatter_to_sp(self, positions: Tensor) -> Tensor:
        """All of them."""
        return positions

    def local_heads(self, whole: Tensor) -> Tensor:
        """All of it."""
        return whole

    def all_reduce_mean(self, statistic: Tensor) -> Tensor:
        """The statistic."""
        return statistic


NO_TP = NoTP()
