"""Read and write safetensors files: streamed and hashed on write, memory-mapped and bounds-checked on read.

The safetensors library writes from a complete dict, hides errno and has no checksum. The file format is small: 8 bytes
of header length, a JSON header, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.fs import FILE_MODE, open_file
from megalaunch.rundir.checkpoint.header import read_header
from megalaunch.rundir.checkpoint.manifest import FileRecord

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_PIECE_BYTES = 1 << 22  # hashed, then written: the write finds each piece in the CPU cache


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: dtype and shape are known now, `data` is called when it is written.

    It returns the tensor, which may be on a device, or yields the rows of its first dimension, to hold one at a time.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Callable[[], torch.Tensor | Iterator[torch.Tensor]]

    @property
    def size(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    path: Path,
    sources: Mapping[str, TensorSource],
    wrote: Callable[[int], None] = lambda count: None,
    mode: int = FILE_MODE,
) -> FileRecord:
    """Write tensors to a new file and sync it to disk.

    Args:
        path: the file, which must not exist.
        sources: the tensors by name.
        wrote: called with the size of every write in bytes.
        mode: mode of the file, before the umask.

    Returns:
        Name, size and hash of the file.

    Raises:
        OSError: as `os.open`, `os.write` and `os.fsync`.
    """
    # widest dtype first: every tensor is aligned, as with the library
    names = sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in names:
        source = sources[name]
        end = position + source.size
        header[name] = {
            "dtype": DTYPE_NAMES[source.dtype],
            "shape": list(source.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path, wrote, mode) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = sources[name].data()
            for part in (data,) if isinstance(data, torch.Tensor) else data:
                file.write(_as_bytes(part))
    return file.record


class HashedFile:
    """A new file that is hashed as it is written and synced when closed. `wrote` gets the size of every write."""

    def __init__(self, path: Path, wrote: Callable[[int], None] = lambda count: None, mode: int = FILE_MODE) -> None:
        self._path, self._hash, self._size, self._wrote, self._mode = path, hashlib.sha256(), 0, wrote, mode

    def __enter__(self) -> HashedFile:
        self._descriptor = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._mode)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self._hash.update(piece)
            while len(piece):  # a full disk accepts part of the data first, and fails at the next call
                taken = os.write(self._descriptor, piece)
                self._wrote(taken)
                piece = piece[taken:]
        self._size += len(view)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    @property
    def record(self) -> FileRecord:
        """Name, size and hash of the written data."""
        return FileRecord(self._path.name, self._size, self._hash.hexdigest())


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class MappedFile:
    """A memory-mapped safetensors file. Its tensors are views of private pages: copy those that must outlive it."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.entries = read_header(path.name, file.read, size)
                # ACCESS_COPY: torch requires writable memory; writes do not reach the file
                self._pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from error
        self.path = path

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises CheckpointError if the file has none of that name."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._pages, dtype=DTYPES[entry.dtype], count=count, offset=entry.begin)
        return flat.reshape(entry.shape)
