"""Somebody's tensors under our names, by a table of pairs: checked as a whole, then read one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.config.schema.model import ModelSpec
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES
from megalaunch.engine.families.pairs import Pair
from megalaunch.engine.families.registry import build_decoder


class Stored(Protocol):
    """Kind (by safetensors' name) and shape of a stored tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorFolder(Protocol):
    """Stored tensors by name."""

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, name: str) -> Tensor: ...


class PairedWeights:
    """The tensors of `folder` as the decoder's parameters, each in its stored format."""

    def __init__(self, folder: TensorFolder, model: ModelSpec, pairs: list[Pair]) -> None:
        self.model, self.pairs = model, pairs
        self.shapes = parameter_shapes(model)
        self._tensors = folder
        self._pair_of = {name: pair for pair in pairs for name in pair.ours}

    def read(self, name: str) -> Tensor:
        """One of the decoder's parameters."""
        return self._ours(self._pair_of[name])[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its stored format."""
        return DTYPES[self._tensors.tensors[self.stored(self._pair_of[name].theirs[0])].dtype]

    def walk(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """The wanted ones, each stored tensor read once."""
        for pair in self.pairs:
            if any(name in wanted for name in pair.ours):
                yield from ((name, tensor) for name, tensor in self._ours(pair).items() if name in wanted)

    def stored(self, name: str) -> str:
        """What a table's name is called in this folder."""
        return name

    def is_spare(self, name: str) -> bool:
        """A stored tensor that no parameter is made of, and that may be there."""
        return False

    def problems(self, source: str) -> Iterator[str]:
        """Every missing, mis-shaped, quantised or unexpected tensor; `source` gives the shapes: `config.json means`."""
        found = self._tensors.tensors
        expected: dict[str, torch.Size] = {}
        for pair in self.pairs:
            expected |= {self.stored(name): shape for name, shape in pair.shapes_of_theirs(self.shapes).items()}
        for name, shape in expected.items():
            if name not in found:
                yield f"missing: {name} {list(shape)}"
            elif found[name].shape != tuple(shape):
                yield f"mis-shaped: {name} is {list(found[name].shape)}, {source} {list(shape)}"
            elif not DTYPES[found[name].dtype].is_floating_point:
                yield f"{name} is stored as {found[name].dtype}: quantised weights are not read"
        for name in found:
            if name not in expected and not self.is_spare(name):
                yield f"unexpected: {name} {list(found[name].shape)}"

    def _ours(self, pair: Pair) -> dict[str, Tensor]:
        theirs = [self._tensors.read(self.stored(name)) for name in pair.theirs]
        return dict(zip(pair.ours, pair.to_ours(theirs), strict=True))


def parameter_shapes(model: ModelSpec) -> Mapping[str, torch.Size]:
    """Global shapes of the decoder's parameters by name."""
    try:
        with torch.device("meta"):
            decoder = build_decoder(model)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # sizes that torch cannot count
        raise CheckpointError(f"no model has these sizes: {str(error).splitlines()[0][:200]}") from error
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}
