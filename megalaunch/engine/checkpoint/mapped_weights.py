"""Foreign tensors under the decoder's names, by a list of weight mappings: validated together, read one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, overload

import torch
from torch import Tensor

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.weight_maps.weight_mapping import WeightMapping
from megalaunch.schema.model import ModelSpec


class TensorInfo(Protocol):
    """Dtype (safetensors' name) and shape of a stored tensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSource(Protocol):
    """Stored tensors by name."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str, row: int | None = None) -> Tensor: ...


class MappedWeights:
    """The decoder's parameters, read from the tensors of `folder` in their stored dtypes."""

    def __init__(self, folder: TensorSource, model: ModelSpec, pairs: list[WeightMapping]) -> None:
        self.model, self.pairs = model, pairs
        self.shapes = parameter_shapes(model)
        self._tensors = folder
        self._pair_of = {name: pair for pair in pairs for name in pair.ours}

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one parameter of the decoder, or one expert of a parameter that stacks them."""
        pair = self._pair_of[name]
        if row is None:
            return self._our_shape(pair)[name]
        if pair.stacked:
            return self._tensors.read(self.tensor_infos(pair.theirs[row]))
        one = [self._tensors.read(self.tensor_infos(theirs), row).unsqueeze(0) for theirs in pair.theirs]
        return pair.to_ours(one)[pair.ours.index(name)][0]

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a parameter."""
        return DTYPES[self._tensors.tensors[self.tensor_infos(self._pair_of[name].theirs[0])].dtype]

    def iter_mapped(self, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted parameters; each stored tensor is read once."""
        for pair in self.pairs:
            if any(name in wanted for name in pair.ours):
                yield from ((name, tensor) for name, tensor in self._our_shape(pair).items() if name in wanted)

    def tensor_infos(self, name: str) -> str:
        """Translate a name of the mapping to the name in this folder."""
        return name

    def unmapped_problem(self, name: str) -> str | None:
        """Return what is wrong with a stored tensor that maps to no parameter; None if it may be skipped."""
        return f"unexpected: {name} {list(self._tensors.tensors[name].shape)}"

    def problems(self, source: str) -> Iterator[str]:
        """Yield every missing, mis-shaped, quantised or unexpected tensor.

        `source` starts the clause that gives the expected shape: `config.json means`.
        """
        found = self._tensors.tensors
        expected: dict[str, torch.Size] = {}
        for pair in self.pairs:
            expected |= {self.tensor_infos(name): shape for name, shape in pair.shapes_of_theirs(self.shapes).items()}
        for name, shape in expected.items():
            if name not in found:
                yield f"missing: {name} {list(shape)}"
            elif found[name].shape != tuple(shape):
                yield f"wrong shape: {name} is {list(found[name].shape)}, {source} {list(shape)}"
            elif not DTYPES[found[name].dtype].is_floating_point or DTYPES[found[name].dtype].itemsize == 1:
                yield f"{name} is stored as {found[name].dtype}: quantized weights are not supported"
        for pair in self.pairs:
            yield from self._dtype_problems(pair)
        for name in found:
            if name not in expected and (problem := self.unmapped_problem(name)) is not None:
                yield problem

    def _dtype_problems(self, pair: WeightMapping) -> Iterator[str]:
        """Yield a problem if tensors that become one parameter have several dtypes."""
        found = [name for name in map(self.tensor_infos, pair.theirs) if name in self._tensors.tensors]
        for name in found if len(pair.ours) == 1 else ():
            dtype, first = self._tensors.tensors[name].dtype, self._tensors.tensors[found[0]].dtype
            if dtype != first:
                yield f"{name} is {dtype}, but {found[0]} is {first}: they become one parameter"

    def _our_shape(self, pair: WeightMapping) -> dict[str, Tensor]:
        theirs = _ReadWhenTaken(self._tensors, [self.tensor_infos(name) for name in pair.theirs])
        try:
            return dict(zip(pair.ours, pair.to_ours(theirs), strict=True))
        except ValueError as error:  # tensors that contradict each other
            raise CheckpointError(str(error)) from error


class _ReadWhenTaken(Sequence[Tensor]):
    """Stored tensors, each read when it is taken: a transform may take one at a time."""

    def __init__(self, source: TensorSource, names: Sequence[str]) -> None:
        self._source, self._names = source, names

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return _ReadWhenTaken(self._source, self._names[index])
        return self._source.read(self._names[index])


def parameter_shapes(model: ModelSpec) -> Mapping[str, torch.Size]:
    """Return the global shapes of the decoder's parameters and buffers by name.

    Raises CheckpointError for impossible sizes.
    """
    try:
        with torch.device("meta"):
            decoder = build_decoder(model)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # sizes that overflow torch's integers
        raise CheckpointError(f"invalid model sizes: {str(error).splitlines()[0][:200]}") from error
    return {name: tensor.shape for name, tensor in (*decoder.named_parameters(), *decoder.named_buffers())}
