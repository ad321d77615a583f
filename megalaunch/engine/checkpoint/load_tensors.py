"""Read full tensors of a checkpoint in one process, assembled from their chunks.

Uses neither a process group nor DCP, whose import takes longer than reading a small checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.safetensors_file import DTYPES, MappedFile
from megalaunch.rundir.checkpoint.contents import WEIGHTS
from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX, TensorIndex, read_tensor_index

_SHOWN = 8  # names of tensors per error message


def read_tensors(directory: Path, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Read full tensors to the CPU, without a process group.

    Args:
        directory: the checkpoint.
        names: the tensors to read; None reads all.

    Raises:
        CheckpointError: a tensor is missing, or a file contradicts the tensor index.
    """
    tensor_index = read_tensor_index(directory)
    wanted = list(tensor_index) if names is None else list(names)
    missing = [name for name in wanted if name not in tensor_index]
    if missing:
        raise CheckpointError(f"the checkpoint {directory} has no {_listed(missing)}")
    files: dict[str, MappedFile] = {}
    return {name: full_tensor(directory, name, tensor_index, files) for name in wanted}


class Read(Protocol):
    """Reads a parameter of the decoder by its name, or one row of its first dimension: one expert of a layer."""

    def __call__(self, name: str, row: int | None = None) -> torch.Tensor: ...


def checkpoint_reader(checkpoint: Path) -> Read:
    """Return a function that reads the parameters of a checkpoint."""
    tensor_index = read_tensor_index(checkpoint)

    def read(name: str, row: int | None = None) -> torch.Tensor:
        return read_parameter(checkpoint, name, tensor_index, row)

    return read


def read_parameter(checkpoint: Path, name: str, tensor_index: TensorIndex, row: int | None = None) -> torch.Tensor:
    """Read one parameter, or one row of its first dimension."""
    if row is not None:
        return full_row(checkpoint, WEIGHTS + name, row, tensor_index, {})
    return full_tensor(checkpoint, WEIGHTS + name, tensor_index, {})


def full_tensor(directory: Path, name: str, tensor_index: TensorIndex, files: dict[str, MappedFile]) -> torch.Tensor:
    """Assemble one tensor from its chunks. `files` caches the opened files across calls."""
    stored, dtype = tensor_index[name], DTYPES[tensor_index[name].dtype]
    parts = []
    for chunk in stored.chunks:  # check every chunk before allocating the full tensor
        if chunk.file not in files:
            files[chunk.file] = MappedFile(directory / chunk.file)
        parts.append(stored_slice(files[chunk.file], name, dtype, chunk.shape))
    full = torch.empty(stored.shape, dtype=dtype)
    for chunk, part in zip(stored.chunks, parts, strict=True):
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.shape, strict=True))
        full[box] = part
    return full


def full_row(
    directory: Path, name: str, row: int, tensor_index: TensorIndex, files: dict[str, MappedFile]
) -> torch.Tensor:
    """Assemble one row of a tensor's first dimension from the chunks that hold parts of it; `files` as above."""
    stored, dtype = tensor_index[name], DTYPES[tensor_index[name].dtype]
    full = torch.empty(stored.shape[1:], dtype=dtype)
    for chunk in stored.chunks:
        first = chunk.offsets[0]
        if not first <= row < first + chunk.shape[0]:
            continue
        if chunk.file not in files:
            files[chunk.file] = MappedFile(directory / chunk.file)
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets[1:], chunk.shape[1:], strict=True))
        full[box] = stored_slice(files[chunk.file], name, dtype, chunk.shape)[row - first]
    return full


def stored_slice(file: MappedFile, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a file. Raises CheckpointError if its dtype or shape contradicts the tensor index."""
    part = file.tensor(name)
    if part.dtype != dtype or part.shape != shape:
        raise CheckpointError(
            f"{file.path}: {name!r} is {part.dtype} {list(part.shape)}, which contradicts {TENSOR_INDEX}"
        )
    return part


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
