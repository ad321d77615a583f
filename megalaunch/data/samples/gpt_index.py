"""Document, sample and shuffle index of one token file, as in Megatron's `GPTDataset`.

The document index is a shuffled list of documents, repeated for each epoch; the sample index cuts their concatenation
into samples of S + 1 tokens; the shuffle index permutes the samples. All three are a pure function of (lengths,
sequence length, requested samples, seed). Large ones are cached on disk and memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.cached_directory import cached_directory
from megalaunch.data.errors import DataError

# Consecutive samples share one token: the last label of one is the first input of the next.
EXTRA_TOKEN = 1
# Megatron shuffles the last epoch separately from the others when less than this fraction of it is needed.
_LAST_EPOCH_APART_BELOW = 0.80
# Entries from which on an index is cached on disk, so that the ranks of a machine share its pages; smaller ones are
# built in a few hundredths of a second.
KEPT_FROM = 1 << 20
# Increment when the same inputs would give a different index.
_ORDER_VERSION = 1
_BLOCK = 1 << 16  # documents processed at a time


@dataclass(frozen=True)
class GPTIndex:
    """The three indices. Sample i has the tokens from `sample_index[shuffle[i]]` to `sample_index[shuffle[i] + 1]`.

    Attributes:
        documents: document index [epochs * documents], sequence numbers in the order they are concatenated.
        sample_index: [samples + 1, 2], pairs (position in `documents`, token offset in that sequence).
        shuffle: shuffle index [samples].
    """

    documents: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle: NDArray[Any]


@dataclass(frozen=True)
class IndexSize:
    """Size of the indices.

    Attributes:
        epochs: number of epochs.
        samples: number of samples in all epochs.
        before_last: number of samples before the last epoch.
        last_apart: whether the last epoch is shuffled separately.
    """

    epochs: int
    samples: int
    before_last: int
    last_apart: bool


def index_size(epoch_tokens: int, sequence_length: int, num_samples: int | None) -> IndexSize:
    """Return the size of the indices for at least `num_samples` samples (None: one epoch), as Megatron computes it."""
    wanted = 1 if num_samples is None else -(-(num_samples * sequence_length + EXTRA_TOKEN) // epoch_tokens)
    epochs = max(wanted, 1)
    samples = (epochs * epoch_tokens - EXTRA_TOKEN) // sequence_length
    if epochs == 1 or num_samples is None:
        return IndexSize(epochs, samples, 0, last_apart=False)
    before_last = ((epochs - 1) * epoch_tokens - EXTRA_TOKEN) // sequence_length
    per_epoch = (epoch_tokens - EXTRA_TOKEN) // sequence_length
    return IndexSize(epochs, samples, before_last, num_samples - before_last < int(_LAST_EPOCH_APART_BELOW * per_epoch))


def build_index(
    lengths: NDArray[np.int32],
    sequences: range,
    sequence_length: int,
    num_samples: int | None,
    random: np.random.RandomState,
) -> GPTIndex:
    """Build Megatron's document, sample and shuffle index with at least `num_samples` samples.

    Args:
        lengths: int32 [num_sequences], tokens of every sequence in the file.
        sequences: the sequences to use (a split).
        sequence_length: S.
        num_samples: number of samples requested; None: one epoch.
        random: generator; the draws (documents first, then samples) are Megatron's.
    """
    epoch_tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    shape = index_size(epoch_tokens, sequence_length, num_samples)
    documents = _shuffle_documents(sequences, shape.epochs, shape.last_apart, random)
    starts = build_sample_index(lengths, documents, shape.samples, sequence_length)
    shuffle = np.arange(shape.samples, dtype=np.uint32 if shape.samples < 2**32 - 2 else np.int64)
    # Shuffled separately, the last epoch stays last, so that samples past `num_samples` are all of that epoch.
    if shape.last_apart:
        random.shuffle(shuffle[: shape.before_last])
        random.shuffle(shuffle[shape.before_last :])
    else:
        random.shuffle(shuffle)
    return GPTIndex(documents, starts, shuffle)


def _shuffle_documents(sequences: range, epochs: int, apart: bool, random: np.random.RandomState) -> NDArray[np.int32]:
    """Build the document index; `apart` shuffles the last epoch separately."""
    one = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    if not apart:
        documents = np.tile(one, epochs)
        random.shuffle(documents)
        return documents
    first = np.tile(one, epochs - 1)
    random.shuffle(first)
    random.shuffle(one)
    return np.concatenate([first, one])


def load_or_build_index(
    folder: Path | None,
    lengths: NDArray[np.int32],
    sequences: range,
    sequence_length: int,
    num_samples: int | None,
    seed: int | Sequence[int],
) -> GPTIndex:
    """Build the indices with a new generator seeded with `seed`; cache large ones in `folder` and memory-map them.

    Any process may build the cached index: one does, the others wait for it. If the folder is not writable, the
    same index is built in memory.
    """

    def build_in_memory() -> GPTIndex:
        """Build the indices in memory."""
        return build_index(lengths, sequences, sequence_length, num_samples, np.random.RandomState(seed))

    part = lengths[sequences.start : sequences.stop]
    shape = index_size(int(part.sum(dtype=np.int64)), sequence_length, num_samples)
    if folder is None or shape.epochs * len(sequences) + shape.samples < KEPT_FROM:
        return build_in_memory()
    settings = {
        "version": _ORDER_VERSION,
        "lengths": hashlib.sha256(np.ascontiguousarray(part).data).hexdigest(),
        "first": sequences.start,
        "sequence_length": sequence_length,
        "num_samples": num_samples,
        "seed": seed if isinstance(seed, int) else list(seed),
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]

    def build(unfinished: Path) -> None:
        index = build_in_memory()
        for field in fields(GPTIndex):
            np.save(unfinished / f"{field.name}.npy", getattr(index, field.name), allow_pickle=False)
        (unfinished / "inputs.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    try:
        return _memory_map(cached_directory(folder, key, build, lambda found: _is_intact(found, shape), lambda: None))
    except (DataError, OSError, ValueError):  # disk full or read-only
        return build_in_memory()


def _memory_map(directory: Path) -> GPTIndex:
    arrays = (np.load(directory / f"{f.name}.npy", mmap_mode="r", allow_pickle=False) for f in fields(GPTIndex))
    # A plain array over the memory map: slices of np.memmap itself are several times slower.
    return GPTIndex(*(np.asarray(array) for array in arrays))


def _is_intact(directory: Path, shape: IndexSize) -> bool:
    try:
        index = _memory_map(directory)
    except (OSError, ValueError):
        return False
    return index.sample_index.shape == (shape.samples + 1, 2) and index.shuffle.shape == (shape.samples,)


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
