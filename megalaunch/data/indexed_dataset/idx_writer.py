"""Writes an `.idx` from streams of lengths and document sizes, in constant memory for any number of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.indexed_dataset.dataset import HEADER, MAGIC, TOKEN_TYPES, VERSION

_AT_ONCE = 1 << 20  # entries read at a time


def write_header(file: BinaryIO, dtype: np.dtype[Any], sequences: int, documents: int) -> None:
    """Write the header of an index (Megatron counts one document more: the entries of the document index)."""
    code = next(code for code, known in TOKEN_TYPES.items() if known == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))


def write_offsets(file: BinaryIO, dtype: np.dtype[Any], lengths: Iterable[NDArray[Any]]) -> None:
    """Write the byte offset of each sequence in the `.bin`, from the lengths in tokens."""
    position = 0
    for part in lengths:
        ends = position + np.cumsum(part, dtype=np.int64) * dtype.itemsize
        file.write((ends - part.astype(np.int64) * dtype.itemsize).astype("<i8").data)
        position = int(ends[-1]) if len(ends) else position


def write_documents(file: BinaryIO, counts: Iterable[NDArray[Any]]) -> None:
    """Write the document index (the first sequence of each, then the number of all) from the sequences per document."""
    file.write(np.zeros(1, "<i8").data)
    total = 0
    for part in counts:
        ends = total + np.cumsum(part, dtype=np.int64)
        file.write(ends.astype("<i8").data)
        total = int(ends[-1]) if len(ends) else total


def copy_index(file: BinaryIO, dtype: np.dtype[Any], lengths: Path, counts: Path) -> None:
    """Write a complete index from two files of int32: tokens of each sequence, sequences of each document."""
    write_header(file, dtype, lengths.stat().st_size // 4, counts.stat().st_size // 4)
    for part in _int32(lengths):
        file.write(part.data)
    write_offsets(file, dtype, _int32(lengths))
    write_documents(file, _int32(counts))


def _int32(path: Path) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        while content := file.read(4 * _AT_ONCE):
            yield np.frombuffer(content, "<i4")
