"""Where tensor-parallel regions begin and end: what a block calls, and the one-device form of it.

Shapes: B batch, S sequence, s the part of it that a rank holds between regions (S without sequence parallelism),
H hidden, F features, V vocabulary; f and v are a rank's part of F and V.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from megalaunch.engine.layout import ParamLayout, local
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.linear import Linear


class Boundary(Protocol):
    """The places where activations change hands; the identity where one device holds all."""

    @property
    def vocabulary(self) -> Axis:
        """The axis that divides the logits."""

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """Token ids [B, S] -> [B, s, H]."""

    def enter(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """All projections of the same input: [B, s, H] -> [B, S, f] each."""

    def gather(self, x_BsH: Tensor) -> Tensor:
        """The input of a region whose work on it is not a projection alone: [B, s, H] -> [B, S, H]."""

    def leave(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """Project and sum over ranks: [B, S, f] -> [B, s, H]."""

    def rows(self, length: int) -> int:
        """s for S = `length`."""

    def whole_sequences(self) -> AbstractContextManager[None]:
        """Within it s is S, whatever S is: for text that grows by a token at a time."""

    def part(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """What this rank applies of a parameter, inside a region."""

    def own(self, positions: Tensor) -> Tensor:
        """Of [..., S] what goes with this rank's tokens between regions, [..., s]."""

    def divide(self, whole: Tensor) -> Tensor:
        """Of [N] what goes with this rank's heads inside a region, [n]."""

    def average(self, statistic: Tensor) -> Tensor:
        """Inside a region: the mean over ranks of what each found of its part of the features."""


class OneDevice:
    """No region at all."""

    vocabulary = Axis("tp")

    def embed(self, tokens_BS: Tensor, embedding: nn.Module) -> Tensor:
        """[B, S] -> [B, S, H]."""
        assert isinstance(embedding.weight, Tensor)
        return F.embedding(tokens_BS, local(embedding.weight))

    def enter(self, x_BsH: Tensor, *projections: Linear) -> tuple[Tensor, ...]:
        """[B, S, H] -> [B, S, F] each."""
        return tuple(projection(x_BsH) for projection in projections)

    def gather(self, x_BsH: Tensor) -> Tensor:
        """It is whole."""
        return x_BsH

    def leave(self, x_BSf: Tensor, projection: Linear) -> Tensor:
        """[B, S, F] -> [B, S, H]."""
        result: Tensor = projection(x_BSf)
        return result

    def rows(self, length: int) -> int:
        """All of them."""
        return length

    def whole_sequences(self) -> AbstractContextManager[None]:
        """As ever."""
        return nullcontext()

    def part(self, parameter: Tensor, layout: ParamLayout) -> Tensor:
        """All of it."""
        return local(parameter)

    def own(self, positions: Tensor) -> Tensor:
        """All of them."""
        return positions

    def divide(self, whole: Tensor) -> Tensor:
        """All of it."""
        return whole

    def average(self, statistic: Tensor) -> Tensor:
        """The statistic."""
        return statistic


ONE_DEVICE = OneDevice()
