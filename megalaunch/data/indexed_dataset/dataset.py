"""Reading token files in Megatron's layout: `PREFIX.bin` holds the tokens, `PREFIX.idx` what they belong to.

Both are memory-mapped; every invariant of the index is checked when it is opened.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# After the magic: version, code of the token type, sequences, entries of the document index; little-endian, no padding.
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
REMAKE = "Make the files anew with `megalaunch preprocess`, or copy both again."
_CHECKED_AT_ONCE = 1 << 20  # entries; bounds the memory that opening a huge index takes


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`; the prefix may hold dots of its own."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`; the prefix may hold dots of its own."""
    return prefix.with_name(prefix.name + ".idx")


class IndexedTokens:
    """The tokens of one prefix: sequences in a row, and documents made of whole sequences.

    `lengths` is int32 [num_sequences] in tokens; `documents` int64 [num_documents + 1] gives the first
    sequence of each document, and at its end num_sequences. Raises DataError for files that are missing,
    cut, altered in a way the index can tell, or not in this layout.
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
        """Sequences in the file."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the file, empty ones included."""
        return len(self.documents) - 1

    def first_token(self, sequence: int) -> int:
        """Position in `stream` of the first token of a sequence; of its end for `num_sequences`."""
        if sequence == self.num_sequences:
            return self.num_tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    @property
    def offsets(self) -> NDArray[Any]:
        """int64 [num_sequences]: the byte of `.bin` at which each sequence begins."""
        return self._offsets

    def document_lengths(self) -> Iterator[NDArray[Any]]:
        """int64 arrays with the tokens of each document, many documents at a time."""
        end = self.num_tokens * self.dtype.itemsize
        for start in range(0, self.num_documents, _CHECKED_AT_ONCE):
            borders = np.asarray(self.documents[start : start + _CHECKED_AT_ONCE + 1])
            inside = borders < self.num_sequences
            positions = np.full(len(borders), end, np.int64)
            positions[inside] = self._offsets[borders[inside]]
            yield np.diff(positions) // self.dtype.itemsize

    def tokens_in(self, sequences: range) -> int:
        """Number of tokens of the sequences in a contiguous range."""
        return self.first_token(sequences.stop) - self.first_token(sequences.start)

    def tokens(self, sequence: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Tokens `start` to `stop` (excluded; None: the end) of a sequence, as a view of the file."""
        first = self.first_token(sequence)
        end = int(self.lengths[sequence]) if stop is None else stop
        view: NDArray[Any] = self.stream[first + start : first + end]
        return view

    def _read_header(self, size: int) -> tuple[np.dtype[Any], int, int]:
        if size < HEADER.size:
            raise self._broken(f"{size} bytes are too few for an index")
        with self._idx.open("rb") as file:
            magic, version, code, sequences, entries = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            raise self._broken(f"it begins with {magic!r} instead of {MAGIC!r}: no Megatron token index")
        if version != VERSION:
            raise self._broken(f"its version is {version}, known is {VERSION}")
        if code not in TOKEN_TYPES:
            raise self._broken(f"its token type has the code {code}, known are 1 to 8")
        if TOKEN_TYPES[code].kind == "f":
            raise self._broken(f"its values are {TOKEN_TYPES[code].name}: no tokens")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if size == expected + sequences and sequences:
            raise self._broken("it holds a mode for each sequence (multimodal data), which is not read here")
        if size != expected:
            raise self._broken(
                f"it has {size:,} bytes, but {sequences:,} sequences and {entries:,} document entries need {expected:,}"
            )
        return TOKEN_TYPES[code], sequences, entries

    def _check_documents(self) -> None:
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
        """The number of all tokens; DataError when lengths and offsets do not fit each other."""
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
                    f"sequence {start + at} begins at byte {self._offsets[start + at]}, "
                    f"by the lengths before it at {expected[at]}"
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
    return "A prefix is the path of both files without .bin and .idx; `megalaunch preprocess` makes them."


def _map(path: Path, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
    if count == 0:  # an empty range cannot be mapped
        return np.empty(0, dtype)
    try:
        # A plain array over the map: slices of np.memmap itself are several times slower.
        return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=(count,)))
    except OSError as error:
        raise cannot("read it", path, error) from error
