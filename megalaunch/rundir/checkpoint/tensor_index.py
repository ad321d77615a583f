"""`tensors.json`, the tensor index: which tensors a checkpoint holds, and which file holds which chunk of each.

DCP stores this as a pickle; here it is JSON, and every entry is validated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.rundir.checkpoint.errors import CheckpointError
from megalaunch.rundir.checkpoint.header import DTYPE_BYTES, are_sizes
from megalaunch.rundir.checkpoint.manifest import is_plain_name

TENSOR_INDEX = "tensors.json"
_MOST_COMPARED = 1_000_000  # pairs of chunks of a tensor; 1024 x 8 ranks need 65,536


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor: its offsets, its shape, and the file that holds it under the tensor's name."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint. `dtype` is safetensors' name; the chunks cover the tensor exactly once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def size(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


TensorIndex = Mapping[str, StoredTensor]
"""The tensors of a checkpoint by name."""


def tensor_index_text(tensor_index: TensorIndex) -> str:
    """Return the JSON text of a tensor index, one tensor per line."""
    lines = []
    for name, tensor in sorted(tensor_index.items()):
        chunks = [{"offsets": chunk.offsets, "shape": chunk.shape, "file": chunk.file} for chunk in tensor.chunks]
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks}
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_tensor_index(directory: Path) -> dict[str, StoredTensor]:
    """Read and validate a checkpoint's tensor index. Raises CheckpointError."""
    path = directory / TENSOR_INDEX
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is no mapping")
        return {name: stored_tensor(name, entry) for name, entry in data.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is not a checkpoint: {TENSOR_INDEX} is missing") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def stored_tensor(name: str, entry: Any) -> StoredTensor:
    """Validate one entry of a tensor index. Raises ValueError, TypeError or KeyError."""
    shape, chunks = entry["shape"], tuple(_chunk(chunk) for chunk in entry["chunks"])
    if not are_sizes(shape):
        raise ValueError(f"{name!r} has an invalid shape")
    if entry["dtype"] not in DTYPE_BYTES:
        raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
    tensor = StoredTensor(entry["dtype"], tuple(shape), chunks)
    if any(not _inside(chunk, tensor.shape) for chunk in chunks):
        raise ValueError(f"{name!r} has a chunk outside its shape")
    filled = sum(math.prod(chunk.shape) for chunk in chunks)
    if filled != math.prod(tensor.shape) or not chunks or _overlap(chunks):
        raise ValueError(f"the chunks of {name!r} do not cover it exactly once")
    return tensor


def _chunk(entry: Any) -> Chunk:
    offsets, shape, file = entry["offsets"], entry["shape"], entry["file"]
    if not are_sizes(offsets) or not are_sizes(shape) or not isinstance(file, str) or not is_plain_name(file):
        raise ValueError("a chunk has invalid sizes or an invalid file name")
    return Chunk(tuple(offsets), tuple(shape), file)


def _inside(chunk: Chunk, shape: tuple[int, ...]) -> bool:
    return len(chunk.offsets) == len(chunk.shape) == len(shape) and all(
        offset + size <= limit for offset, size, limit in zip(chunk.offsets, chunk.shape, shape, strict=True)
    )


def _overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Return True if two chunks share an element: a sweep along the dim with the most cuts."""
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].shape))
    if not dims:
        return True
    sweep = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[Chunk] = []
    compared = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[sweep]):
        active = [other for other in active if other.offsets[sweep] + other.shape[sweep] > chunk.offsets[sweep]]
        compared += len(active)
        if compared > _MOST_COMPARED:
            raise ValueError("a tensor has more adjacent chunks than any layout creates")
        if any(_share(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _share(first: Chunk, second: Chunk) -> bool:
    return all(
        a < b + second_size and b < a + first_size
        for a, b, first_size, second_size in zip(first.offsets, second.offsets, first.shape, second.shape, strict=True)
    )
