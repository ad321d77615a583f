"""Which tensors of a Hugging Face folder are which of the decoder's parameters, and how the one becomes the other.

Every transform only moves values, so that going there and back gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class WeightMapping:
    """Tensors that together become each other."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Transform
    to_theirs: Transform

    def shapes_of_theirs(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Their shapes, from ours by name; raises KeyError where the decoder has no such parameter."""
        made = self.to_theirs([torch.empty(shapes[name], device="meta") for name in self.ours])
        return {name: tensor.shape for name, tensor in zip(self.theirs, made, strict=True)}


def rename(theirs: str, ours: str) -> WeightMapping:
    """One tensor under two names."""
    return WeightMapping((theirs,), (ours,), list, list)


def transposed(theirs: str, ours: str) -> WeightMapping:
    """A matrix kept as [in, out] there, as GPT-2's are."""

    def turn(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.T for tensor in tensors]

    return WeightMapping((theirs,), (ours,), turn, turn)


def concat_rows(theirs: str, ours: Sequence[str], rows: Sequence[int], *, turned: bool = False) -> WeightMapping:
    """Several of ours, of these rows, one under the other in one of theirs; `turned`: kept as [in, out] there."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        return list(torch.split(whole.T if turned else whole, list(rows)))

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = torch.cat(list(tensors))
        return [whole.T if turned else whole]

    return WeightMapping((theirs,), tuple(ours), split, join)


def interleave_heads(theirs: str, ours: Sequence[str], heads: int) -> WeightMapping:
    """Queries, keys and values of the first head, then those of the second, ... as GPT-NeoX keeps them."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (whole,) = tensors
        by_head = whole.reshape(heads, len(ours), -1, *whole.shape[1:])
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in tensors]
        return [torch.stack(by_head, dim=1).flatten(0, 2)]

    return WeightMapping((theirs,), tuple(ours), split, join)
