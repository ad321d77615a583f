"""Exchange shards of matrices for whole matrices among the ranks that share them, and back: two all-to-alls.

With the shards of n matrices on each of n ranks, rank r sends its shard of matrix i to rank i, and gets the whole of
matrix r. Over several axes (FSDP and tp) this is repeated axis by axis, from the outermost, which sharded last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalaunch.engine.collectives import all_to_all_v_async
from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Axis


@dataclass(frozen=True)
class ShardedMatrix:
    """This rank's shard of a matrix, and of a tensor of its shape that is to be exchanged.

    Attributes:
        weight: The shard of the matrix.
        values: The shard that is exchanged.
        shape: Rows and columns of the whole matrix.
        axes: The mesh axes over which it is sharded, outermost first.
        dims: The dim (0 or 1) that each of them shards.
    """

    weight: Tensor
    values: Tensor
    shape: tuple[int, int]
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the matrix."""
        return math.prod(axis.size for axis in self.axes)

    def shape_at(self, level: int) -> tuple[int, int]:
        """Return the shape of this rank's shard once the first `level` axes are gathered."""
        shape = list(self.shape)
        for axis, dim in zip(reversed(self.axes[level:]), reversed(self.dims[level:]), strict=True):
            shape[dim] = _chunk_sizes(shape[dim], axis.size)[axis.rank]
        return shape[0], shape[1]

    def shard_shapes(self, level: int) -> list[tuple[int, int]]:
        """Return the shape of every rank's shard along axis `level`, once the axes before it are gathered."""
        rows, columns = self.shape_at(level + 1)
        dim, ranks = self.dims[level], self.axes[level].size
        sizes = _chunk_sizes(columns if dim else rows, ranks)
        return [(rows, size) if dim else (size, columns) for size in sizes]


def list_matrices(parameter: Tensor, values: Tensor) -> Iterator[ShardedMatrix]:
    """Yield the matrices of a parameter [out, in] or [E, out, in] that this rank has shards of.

    Args:
        parameter: The parameter.
        values: A tensor of its shape and placements.
    """
    axes, dims, first = [], [], parameter.ndim - 2
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
            dim = -1 if placement.is_replicate() else placement.dim - first  # type: ignore[attr-defined]
            if dim >= 0 and mesh[name].size() > 1:  # below 0: experts are sharded, and each of them is whole
                axes.append(Axis.from_mesh(mesh, name))
                dims.append(dim)
    shape = (parameter.shape[-2], parameter.shape[-1])
    shards = [to_local_no_grad(tensor) for tensor in (parameter, values)]
    for weight, value in zip(*(shard.unbind(0) if first else (shard,) for shard in shards), strict=True):
        yield ShardedMatrix(weight, value, shape, tuple(axes), tuple(dims))


@dataclass(frozen=True)
class _Exchange:
    """The all-to-all over one axis: ranks hold shards of the `given` matrices; each collects some of them whole.

    "Whole" is along this axis: `level` is its position in the matrices' axes, and later ones still shard.
    """

    given: Sequence[ShardedMatrix]
    axis: Axis
    level: int

    @property
    def by_rank(self) -> list[Sequence[ShardedMatrix]]:
        """The matrices that each rank of the axis collects."""
        width = -(-len(self.given) // self.axis.size)
        return [self.given[rank * width : (rank + 1) * width] for rank in range(self.axis.size)]

    @property
    def collected(self) -> Sequence[ShardedMatrix]:
        """The matrices that this rank collects."""
        return self.by_rank[self.axis.rank]

    def gather(self, shards: Sequence[Tensor], empty: Tensor) -> list[Tensor]:
        """Return the collected matrices, given this rank's shards; `empty` has their dtype and device."""
        received = self._send(shards, self._given_counts(), self._collected_counts(), empty)
        parts = torch.split(received, self._collected_counts())
        of_ranks = [_unflatten(part, shapes) for part, shapes in zip(parts, self._collected_shapes(), strict=True)]
        return [
            torch.cat(pieces, dim=matrix.dims[self.level])
            for matrix, pieces in zip(self.collected, zip(*of_ranks, strict=True), strict=True)
        ]

    def scatter(self, whole: Sequence[Tensor], empty: Tensor) -> list[Tensor]:
        """Return this rank's shards of the given matrices, given the collected ones."""
        shards: list[list[Tensor]] = [[] for _ in range(self.axis.size)]
        for matrix, values in zip(self.collected, whole, strict=True):
            dim = matrix.dims[self.level]
            sizes = [shape[dim] for shape in matrix.shard_shapes(self.level)]
            for of_rank, shard in zip(shards, torch.split(values, sizes, dim), strict=True):
                of_rank.append(shard)
        sent = [shard for of_rank in shards for shard in of_rank]
        received = self._send(sent, self._collected_counts(), self._given_counts(), empty)
        return _unflatten(received, [matrix.shape_at(self.level) for matrix in self.given])

    def _collected_shapes(self) -> list[list[tuple[int, int]]]:
        """Return each rank's shapes of the shards of the collected matrices."""
        return [[matrix.shard_shapes(self.level)[rank] for matrix in self.collected] for rank in range(self.axis.size)]

    def _collected_counts(self) -> list[int]:
        return [sum(map(math.prod, shapes)) for shapes in self._collected_shapes()]

    def _given_counts(self) -> list[int]:
        return [sum(math.prod(matrix.shape_at(self.level)) for matrix in part) for part in self.by_rank]

    def _send(self, parts: Sequence[Tensor], sent: list[int], received: list[int], empty: Tensor) -> Tensor:
        flat = torch.cat([empty, *(part.flatten() for part in parts)])
        return all_to_all_v_async(flat, sent, received, self.axis).wait()


def gather_matrices(matrices: Sequence[ShardedMatrix], dtype: torch.dtype) -> list[Tensor]:
    """Return the whole values, in `dtype`, of those of the matrices that this rank collects. Collective.

    All matrices have the same axes. Of `num_ranks` matrices each rank collects one, of fewer one or none.
    """
    values = [matrix.values.to(dtype) for matrix in matrices]
    for exchange in _exchanges(matrices):
        values = exchange.gather(values, matrices[0].values.new_empty(0, dtype=dtype))
    return values


def scatter_matrices(whole: Sequence[Tensor], matrices: Sequence[ShardedMatrix], dtype: torch.dtype) -> list[Tensor]:
    """Return this rank's shard of every matrix, given the whole ones that it collected. Collective."""
    values = list(whole)
    for exchange in reversed(_exchanges(matrices)):
        values = exchange.scatter(values, matrices[0].values.new_empty(0, dtype=dtype))
    return values


def _exchanges(matrices: Sequence[ShardedMatrix]) -> list[_Exchange]:
    """Return the exchange over each axis of the matrices, outermost first."""
    exchanges: list[_Exchange] = []
    for level, axis in enumerate(matrices[0].axes):
        exchanges.append(_Exchange(matrices, axis, level))
        matrices = exchanges[-1].collected
    return exchanges


def _unflatten(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return views of consecutive parts of a flat tensor."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _chunk_sizes(size: int, parts: int) -> list[int]:
    """Return the sizes of the parts by torch.chunk's rule: the last ones may have less, or nothing."""
    width = -(-size // parts)
    return [max(0, min(width, size - part * width)) for part in range(parts)]
