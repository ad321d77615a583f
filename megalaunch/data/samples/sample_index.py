"""The sample index: where each sample begins in the concatenated documents. Vectorised form of Megatron's C++ loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16  # documents processed at a time


def build_sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], samples: int, sequence_length: int
) -> NDArray[Any]:
    """Return where samples 0 to `samples` begin in the concatenated documents, as Megatron's `build_sample_idx`.

    Sample k begins at token k * sequence_length of the concatenation, in the last document that begins at or before
    it: documents without tokens are skipped, as by Megatron's loop. Documents are processed in blocks that fit in the
    CPU cache, in buffers reused by all blocks.

    Args:
        lengths: int32 [num_sequences], tokens of each sequence.
        documents: int32, the document index.
        samples: number of samples.
        sequence_length: S.

    Returns:
        [samples + 1, 2] pairs (position in `documents`, token offset in that document); int32 if the values fit,
        else int64.
    """
    longest = int(lengths.max(initial=0))
    narrow = max(len(documents), longest) < 2**31
    starts = np.zeros((samples + 1, 2), np.int32 if narrow else np.int64)
    size = min(_BLOCK, len(documents) + len(documents) % 2)
    block, wide = _SampleIndexBuilder(starts, sequence_length, longest, size, np.uint32), None
    before = 0
    for first in range(0, len(documents), size):
        part = documents[first : first + size]
        tokens = block.fill(first, before, lengths, part)
        if tokens is None:
            wide = wide or _SampleIndexBuilder(starts, sequence_length, longest, size, np.int64)
            tokens = wide.fill(first, before, lengths, part)
            assert tokens is not None
        before += tokens
    return starts


class _SampleIndexBuilder:
    """Fills rows of `starts` for up to `size` documents at a time.

    The cumulative sum, which dominates the time, runs over pairs of documents only; one comparison then decides in
    which document of its pair a sample begins. `number` is the dtype within a block: numpy processes twice as many
    32-bit values at a time.
    """

    def __init__(self, starts: NDArray[Any], sequence_length: int, longest: int, size: int, number: type[Any]) -> None:
        self._starts, self._sequence_length = starts, sequence_length
        self._most = (2**32 if number is np.uint32 else 2**63) - 2 * sequence_length
        self._certain = size * longest <= self._most
        self._lengths = np.empty(size, np.int32)
        self._pairs, self._ends = np.empty((2, size // 2), number)
        self._begun = np.empty(size // 2 + 1, number)

    def fill(self, first: int, before: int, lengths: NDArray[np.int32], documents: NDArray[np.int32]) -> int | None:
        """Fill the rows of samples that begin in `documents` and return the number of tokens of these documents.

        Args:
            first: position in the document index of the first of `documents`.
            before: tokens of all documents before them.
            lengths: int32 [num_sequences], tokens of each sequence.
            documents: int32, the block of the document index.

        Returns:
            The number of tokens, or None (and no row is filled) if it overflows the dtype. Row 0 stays (0, 0) even if
            the first documents are empty, as in Megatron.
        """
        passed, phase = divmod(before, self._sequence_length)
        taken = self._lengths[: len(documents) + len(documents) % 2]
        taken[-1] = 0
        # All indices are in range; `clip` is the mode with the cheapest bounds check.
        lengths.take(documents, mode="clip", out=taken[: len(documents)])
        taken = taken.view(np.uint32) if self._ends.dtype == np.uint32 else taken.astype(np.int64)
        size = len(taken) // 2
        pairs = np.add(taken[::2], taken[1::2], out=self._pairs[:size])
        if not self._certain and int(pairs.sum(dtype=np.int64)) > self._most:
            return None
        # Added to every end so that the division rounds up: to the number of samples that begin before it.
        added = phase + self._sequence_length - 1
        pairs[0] += added
        ends = np.cumsum(pairs, dtype=pairs.dtype, out=self._ends[:size])
        pairs[0] -= added
        begun = np.floor_divide(ends, self._sequence_length, out=self._begun[1 : size + 1])
        if not before:
            np.maximum(begun, 1, out=begun)
        done, stop = max(passed + bool(phase), 1), min(passed + int(begun[-1]), len(self._starts))
        tokens_here = int(ends[-1]) - added
        if stop > done:
            np.subtract(ends, pairs, out=pairs)
            self._set(first, passed, done, stop, taken, size)
        return tokens_here

    def _set(self, first: int, passed: int, done: int, stop: int, taken: NDArray[Any], size: int) -> None:
        """Set rows `done` to `stop`; `passed` samples have begun before the first document of this block."""
        sequence_length, begins = self._sequence_length, self._pairs[:size]
        found = self._found(self._begun[1 : size + 1], done - passed, stop - passed)
        lowest, limit = ((number - passed + 1) * sequence_length - 1 for number in (done, stop))
        tokens: NDArray[Any] = np.arange(lowest, limit, sequence_length, dtype=begins.dtype)
        tokens -= begins.take(found)
        found *= 2
        of_one = taken.take(found)
        in_other = tokens >= of_one
        of_one *= in_other
        tokens -= of_one
        self._starts[done:stop, 1] = tokens
        found += first
        found += in_other
        self._starts[done:stop, 0] = found

    def _found(self, begun: NDArray[Any], done: int, stop: int) -> NDArray[np.intp]:
        """Return the pairs in which samples `done` to `stop` begin.

        `begun` counts the samples that begin before the end of each pair.
        """
        if 2 * (stop - done) > len(begun):  # count the pairs that end before each sample begins
            passed: NDArray[np.intp] = np.bincount(begun, minlength=stop)[:stop]
            return np.cumsum(passed, out=passed)[done:]
        self._begun[0] = done
        earlier = self._begun[: len(begun)]
        found = np.flatnonzero(begun != earlier)
        if len(found) < stop - done:  # several samples begin in one pair
            found = np.repeat(found, (begun.take(found) - earlier.take(found)).astype(np.int64))
        return found[: stop - done]
