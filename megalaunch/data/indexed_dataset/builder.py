"""Writes indexed datasets in Megatron's file format, byte for byte, complete or not at all.

The index is written from streams of lengths and document sizes, in constant memory for any number of documents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot, open_output
from megalaunch.data.indexed_dataset.dataset import HEADER, MAGIC, TOKEN_TYPES, VERSION, bin_path, idx_path
from megalaunch.fs import AtomicFile, sync_directory

_LARGEST_UINT16_VOCABULARY = 65500  # exclusive; Megatron's limit, less than 65,536
_LONGEST_SEQUENCE = 2**31 - 1
_AT_ONCE = 1 << 20  # entries read at a time


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores tokens of a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < _LARGEST_UINT16_VOCABULARY else np.dtype("<i4")


class TokenWriter:
    """Writes one prefix (Megatron's `IndexedDatasetBuilder`), as a context manager.

    A normal exit publishes both files, an exception removes them. Existing files of the prefix stay until then.

    Args:
        prefix: path without .bin and .idx.
        dtype: dtype of the stored tokens (`token_type`).

    Raises:
        DataError: the disk is full, the directory is not writable, or another process is writing the same prefix.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.num_tokens = 0
        self._range = np.iinfo(dtype)
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._bin = open_output(bin_path(prefix))
        self._idx: AtomicFile | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents ended so far."""
        return len(self._documents) - 1

    def add_sequence(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Append one sequence, which may be empty, to the current document.

        Raises:
            DataError: a token does not fit the dtype, the sequence has over 2^31 - 1 tokens, or writing failed.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and (ids.min() < self._range.min or ids.max() > self._range.max):
            worst = int(ids.min() if ids.min() < self._range.min else ids.max())
            raise DataError(
                f"token {worst} of document {self.num_documents} does not fit {self.dtype.name}", file=self.prefix
            )
        if ids.size > _LONGEST_SEQUENCE:
            raise DataError(f"document {self.num_documents} has over 2^31 - 1 tokens", file=self.prefix)
        try:
            self._bin.file.write(ids.astype(self.dtype).data)
        except OSError as error:
            raise self._failed(error) from error
        self._lengths.append(ids.size)
        self.num_tokens += ids.size

    def end_document(self) -> None:
        """End the current document; one without a sequence is an empty document."""
        self._documents.append(len(self._lengths))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            self._bin.discard()
            if self._idx is not None:
                self._idx.discard()

    def _publish(self) -> None:
        """Publish both files, the index last: if it exists, its tokens are complete."""
        self._idx = open_output(idx_path(self.prefix))
        self._write_index(self._idx)
        self._bin.sync()
        self._idx.sync()
        # Remove the old index before renaming: a crash in between leaves no index rather than one of other tokens.
        self._idx.path.unlink(missing_ok=True)
        self._bin.publish()
        self._idx.publish()
        sync_directory(self.prefix.parent)

    def _write_index(self, unfinished: AtomicFile) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        write_header(unfinished.file, self.dtype, len(lengths), self.num_documents)
        unfinished.file.write(lengths.data)
        write_offsets(unfinished.file, self.dtype, [lengths])
        write_documents(unfinished.file, [np.diff(np.asarray(self._documents, dtype="<i8"))])

    def _failed(self, error: OSError) -> DataError:
        return cannot(
            "write it", self.prefix, error, "Free space there, or choose another folder; nothing was changed."
        )


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
