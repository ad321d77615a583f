"""Reads indexed datasets in Megatron's file format: `PREFIX.bin` has the tokens, `PREFIX.idx` sequences and documents.

`IndexedTokens` memory-maps both and checks all invariants of the index on opening. `TokenReader` reads tokens of a
`.bin` into new arrays: a memory map would count every page it ever touched, and a file truncated during the run would
kill it by a signal.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# Magic, version, dtype code, sequences, entries of the document index; little-endian, no padding.
HEADER = struct.Struct("<9sQBQQ")
TOKEN_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
REMAKE = "Run `megalaunch preprocess` again, or copy both files again."
_RESTORE = "Repair the disk or copy the file again; the run resumes from its last checkpoint."
_CHECKED_AT_ONCE = 1 << 20  # entries; bounds the memory for opening a huge index


def bin_path(prefix: Path) -> Path:
    """Return `PREFIX.bin`; the prefix may contain dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return `PREFIX.idx`; the prefix may contain dots."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedTokens:
    """The tokens of one prefix (Megatron's `IndexedDataset`): consecutive sequences, and documents of whole sequences.

    Attributes:
        prefix: path without .bin and .idx.
        dtype: dtype of the stored tokens.
        lengths: int32 [num_sequences], tokens of each sequence.
        documents: int64 [num_documents + 1], the first sequence of each document, then num_sequences.
        num_tokens: number of all tokens.
        stream: all tokens [num_tokens], memory-mapped.

    Raises:
        DataError: the files are missing, truncated, not in this format, or altered in a way that the index reveals.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._idx, self._bin = idx_path(prefix), bin_path(prefix)
        sizes = {path: _size(path, prefix) for path in (self._idx, self._bin)}
        self.dtype, sequences, entries = self._read_header(sizes[self._idx])
        self.lengths = _map(self._idx, np.dtype("<i4"), HEADER.size, sequences)
        self._offsets = _map(self._idx, np.dtype("<i8"), HEADER.size + 4 * sequences, sequences)
        self.documents = _map(self._idx, np.dtype("<i8"), HEADER.size + 12 * sequences, entries)
        self._check_documents()
        self.num_tokens = self._check_lengths()
        self._check_bin(sizes[self._bin])
        self.stream = _map(self._bin, self.dtype, 0, self.num_tokens)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the file."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents in the file, including empty ones."""
        return len(self.documents) - 1

    def first_token(self, sequence: int) -> int:
        """Return the position in `stream` of a sequence's first token; `num_tokens` for `num_sequences`."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    @property
    def offsets(self) -> NDArray[Any]:
        """int64 [num_sequences]: byte offset of each sequence in the `.bin`."""
        return self._offsets

    def document_lengths(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of each document, as int64 arrays of many documents."""
        end = self.num_tokens * self.dtype.itemsize
        for start in range(0, self.num_documents, _CHECKED_AT_ONCE):
            borders = np.asarray(self.documents[start : start + _CHECKED_AT_ONCE + 1])
            inside = borders < self.num_sequences
            positions = np.full(len(borders), end, np.int64)
            positions[inside] = self._offsets[borders[inside]]
            yield np.diff(positions) // self.dtype.itemsize

    def tokens_in(self, sequences: range) -> int:
        """Return the number of tokens in a contiguous range of sequences."""
        return self.first_token(sequences.stop) - self.first_token(sequences.start)

    def tokens(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return tokens `start` to `stop` (exclusive; None: the end) of a sequence, as a view of the memory map."""
        first = self.first_token(sequence)
        end = int(self.lengths[sequence]) if stop is None else stop
        view: NDArray[Any] = self.stream[first + start : first + end]
        return view

    def _read_header(self, size: int) -> tuple[np.dtype[Any], int, int]:
        """Return dtype, number of sequences and entries of the document index; DataError for an invalid `.idx`."""
        if size < HEADER.size:
            raise self._broken(f"{size} bytes are too few for an index")
        with self._idx.open("rb") as file:
            magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            raise self._broken(f"it begins with {magic!r} instead of {MAGIC!r}: not a Megatron .idx file")
        if version != VERSION:
            raise self._broken(f"its version is {version}; only {VERSION} is supported")
        if code not in TOKEN_TYPES:
            raise self._broken(f"its dtype code is {code}; 1 to 8 are defined")
        if TOKEN_TYPES[code].kind == "f":
            raise self._broken(f"its dtype is {TOKEN_TYPES[code].name}, which cannot store token ids")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if size == expected + sequences and sequences:
            raise self._broken("it has a mode for each sequence (multimodal data), which is not supported")
        if size != expected:
            raise self._broken(
                f"it has {size:,} bytes, but {sequences:,} sequences and {entries:,} document entries need {expected:,}"
            )
        return TOKEN_TYPES[code], sequences, entries

    def _check_documents(self) -> None:
        """Raise DataError unless the document index rises from 0 to the number of sequences."""
        last = len(self.lengths)
        if not len(self.documents):
            raise self._broken("its document index is empty")
        if self.documents[0] != 0 or self.documents[-1] != last:
            raise self._broken(
                f"its document index goes from {self.documents[0]} to {self.documents[-1]} instead of 0 to {last}"
            )
        for start in range(0, len(self.documents) - 1, _CHECKED_AT_ONCE):
            falling = np.diff(self.documents[start : start + _CHECKED_AT_ONCE + 1]) < 0
            if falling.any():
                raise self._broken(f"document {start + int(falling.argmax())} ends before it begins")

    def _check_lengths(self) -> int:
        """Return the number of all tokens; DataError if lengths and offsets are inconsistent."""
        total = 0
        for start in range(0, len(self.lengths), _CHECKED_AT_ONCE):
            lengths = self.lengths[start : start + _CHECKED_AT_ONCE]
            if (lengths < 0).any():
                sequence = start + int((lengths < 0).argmax())
                raise self._broken(f"sequence {sequence} has a length of {self.lengths[sequence]}")
            ends = total + np.cumsum(lengths, dtype=np.int64)
            expected = (ends - lengths) * self.dtype.itemsize
            wrong = self._offsets[start : start + _CHECKED_AT_ONCE] != expected
            if wrong.any():
                at = int(wrong.argmax())
                raise self._broken(
                    f"sequence {start + at} begins at byte {self._offsets[start + at]}; "
                    f"the lengths before it add up to {expected[at]}"
                )
            total = int(ends[-1])
        return total

    def _check_bin(self, size: int) -> None:
        expected = self.num_tokens * self.dtype.itemsize
        if size != expected:
            raise DataError(
                f"it has {size:,} bytes, but its index says {expected:,} "
                f"({self.num_tokens:,} tokens of {self.dtype.itemsize})",
                file=self._bin,
                fix=REMAKE,
            )

    def _broken(self, cause: str) -> DataError:
        return DataError(cause, file=self._idx, fix=REMAKE)


def _size(path: Path, prefix: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise DataError("no such file", file=path, fix=_prefix_hint(prefix)) from None
    except OSError as error:
        raise cannot("read it", path, error) from error


def _prefix_hint(prefix: Path) -> str:
    if prefix.suffix in (".bin", ".idx"):
        return f"Give the prefix without {prefix.suffix}: {prefix.with_suffix('')}."
    near = sorted(prefix.parent.glob(prefix.name + "*.idx"))
    if near:
        return f"Did you mean {near[0].with_suffix('')}?"
    return "A prefix is the path of both files without .bin and .idx; `megalaunch preprocess` writes them."


def _map(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # an empty range cannot be memory-mapped
        return np.empty(0, dtype)
    try:
        # A plain array over the memory map: slices of np.memmap itself are several times slower.
        return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
    except OSError as error:
        raise cannot("read it", path, error) from error


class TokenReader:
    """An open `.bin` (Megatron's `_FileBinReader`). Thread-safe: `pread` has no shared file position."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise cannot("read it", path, error) from error

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens starting at token `first`; DataError if the file cannot be read or is too short."""
        tokens = np.empty(count, self.dtype)
        rest, offset = tokens.view(np.uint8).data, first * self.dtype.itemsize
        while rest:
            try:
                done = os.preadv(self._file.fileno(), [rest], offset)
            except OSError as error:
                raise cannot("read it", self.path, error, _RESTORE) from error
            if done == 0:
                raise DataError(f"it ends before token {first + count:,}", file=self.path, fix=REMAKE)
            rest, offset = rest[done:], offset + done
        return tokens
