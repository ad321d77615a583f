"""Mappings between the tensors of a Hugging Face folder and the decoder's parameters.

Transforms only move values, so a round trip gives identical bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalaunch.schema.model import ModelSpec

Transform = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def holds_experts(name: str) -> bool:
    """Return True for a parameter of the decoder that stacks the experts of a layer, [E, ...]."""
    return ".mlp.experts." in name


@dataclass(frozen=True)
class WeightMapping:
    """A group of foreign tensors and the parameters of the decoder that they convert to, in both directions.

    Transforms of experts act on each by itself, so that they may be called with one at a time, [1, ...].
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Transform
    to_theirs: Transform
    stacked: bool = False
    """The parameter is the stack of the foreign tensors along a new first dimension: each may be read by itself."""

    def shapes_of_theirs(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the foreign tensors' shapes, given the parameters' shapes. Raises KeyError for a missing parameter."""
        made = self.to_theirs([torch.empty(shapes[name], device="meta") for name in self.ours])
        return {name: tensor.shape for name, tensor in zip(self.theirs, made, strict=True)}


def rename(theirs: str, ours: str) -> WeightMapping:
    """Map one tensor under two names, unchanged."""
    return WeightMapping((theirs,), (ours,), list, list)


def transposed(theirs: str, ours: str) -> WeightMapping:
    """Map a matrix stored as [in, out], as in GPT-2."""

    def turn(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.T for tensor in tensors]

    return WeightMapping((theirs,), (ours,), turn, turn)


def concat_rows(theirs: str, ours: Sequence[str], rows: Sequence[int], *, turned: bool = False) -> WeightMapping:
    """Map parameters to one tensor that concatenates their rows.

    Args:
        theirs: the concatenated tensor.
        ours: the parameters, in the order of their rows.
        rows: number of rows of each.
        turned: the concatenated tensor is stored as [in, out].
    """

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        return list(torch.split(fused.T if turned else fused, list(rows)))

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        fused = torch.cat(list(tensors))
        return [fused.T if turned else fused]

    return WeightMapping((theirs,), tuple(ours), split, join)


def interleave_heads(theirs: str, ours: Sequence[str], heads: int) -> WeightMapping:
    """Map Q, K and V to one matrix, interleaved by head as in GPT-NeoX: q, k, v of head 0, then of head 1, ..."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        by_head = fused.reshape(heads, len(ours), -1, *fused.shape[1:])
        return [part.flatten(0, 1) for part in by_head.unbind(1)]

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in tensors]
        return [torch.stack(by_head, dim=1).flatten(0, 2)]

    return WeightMapping((theirs,), tuple(ours), split, join)


def rope_pairs_to_halves(theirs: str, ours: str, heads: int, rotated: int) -> WeightMapping:
    """Map a projection whose files interleave the rotated pairs, as DeepSeek's do, to the rotate-half order.

    Args:
        theirs: the projection with pairs (0, 1), (2, 3), ... in the last `rotated` rows of each head.
        ours: the parameter, with pairs (0, R / 2), (1, R / 2 + 1), ..., R = `rotated`.
        heads: number of heads.
        rotated: rows of a head that are rotated, R.
    """

    def reorder(tensor: Tensor, pairs: tuple[int, int]) -> Tensor:
        by_head = tensor.view(heads, -1, *tensor.shape[1:])
        kept, turned = torch.split_with_sizes(by_head, (by_head.shape[1] - rotated, rotated), dim=1)
        return torch.cat(
            (kept, turned.reshape(heads, *pairs, *tensor.shape[1:]).transpose(1, 2).flatten(1, 2)), dim=1
        ).flatten(0, 1)

    def to_halves(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [reorder(tensor, (rotated // 2, 2)) for tensor in tensors]

    def to_pairs(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [reorder(tensor, (2, rotated // 2)) for tensor in tensors]

    return WeightMapping((theirs,), (ours,), to_halves, to_pairs)


@dataclass(frozen=True)
class Multimodal:
    """The naming schemes of a multimodal model."""

    layouts: tuple[Mapping[str, str], ...]
    """Maps from prefixes of the family's names to those in files; the published layout comes first."""
    vision: tuple[str, ...]
    """Prefixes of the vision tower's tensors, which are skipped."""

    def layout(self, tensor_names: Collection[str]) -> Mapping[str, str]:
        """Return the layout of a folder that holds these tensors."""
        for layout in self.layouts:
            if any(name.startswith(tuple(layout.values())) for name in tensor_names):
                return layout
        return self.layouts[0]


def stored_name(name: str, layout: Mapping[str, str]) -> str:
    """Return the name in a layout of one of the family's names."""
    start = next((start for start in layout if name.startswith(start)), None)
    return name if start is None else layout[start] + name.removeprefix(start)


@dataclass(frozen=True)
class FamilyWeights:
    """The tensors of one family. Older files omit `prefix` before all names but the head's."""

    tensors: Callable[[ModelSpec], Iterator[WeightMapping]]
    """The names of published files, in which exports are written."""
    fused: Callable[[ModelSpec], Iterator[WeightMapping]] | None = None
    """Names with the experts of a layer in one tensor, as in transformers' modules, which can be saved like that."""
    prefix: str = ""
    dropped: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Suffixes of stored buffers, which are computed and not loaded."""
    copies: Callable[[ModelSpec], Mapping[str, str]] = lambda model: {}
    """Tensors that published files hold twice: the name of each copy and of the tensor that it equals."""
    multimodal: Multimodal | None = None
    """Tensor names in the multimodal model that contains this family's decoder."""

    def mappings(self, model: ModelSpec, held: Collection[str]) -> list[WeightMapping]:
        """Return the mappings of files that hold the tensors `held`."""
        fused = self.fused is not None and any(name.endswith(".experts.gate_up_proj") for name in held)
        return list(self.fused(model) if fused and self.fused is not None else self.tensors(model))
