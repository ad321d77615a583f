"""Megatron's order of samples: documents shuffled, joined, cut into samples, samples shuffled.

Three arrays that are a pure function of (lengths, sequence length, requested samples, seed); large ones are kept.
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

from megalaunch.data.cache import cached_directory
from megalaunch.data.errors import DataError

# A sample shares its last token with the next one: it is the last label here and the first input there.
SHARED = 1
# Megatron shuffles the last epoch apart from the others when less than this share of it is needed.
_LAST_EPOCH_APART_BELOW = 0.80
# Entries from which on an order is kept on disk, where the ranks of a machine share its memory; fewer are made
# in a few hundredths of a second.
KEPT_FROM = 1 << 20
_BLOCK, _SMALLEST_BLOCK = 1 << 16, 1 << 12  # documents
# Raise it when the same inputs would give another order than before.
_ORDER_VERSION = 1


@dataclass(frozen=True)
class SampleOrder:
    """Which tokens make up sample i: from entry `starts[shuffle[i]]` to entry `starts[shuffle[i] + 1]`.

    documents: [epochs * documents] numbers of sequences in the order they are joined;
    starts: [samples + 1, 2] pairs (position in `documents`, token offset in that sequence);
    shuffle: [samples].
    """

    documents: NDArray[np.int32]
    starts: NDArray[Any]
    shuffle: NDArray[Any]


@dataclass(frozen=True)
class OrderShape:
    """How many epochs and samples a request makes: `before_last` samples lie before the last epoch."""

    epochs: int
    samples: int
    before_last: int
    last_apart: bool


def order_shape(epoch_tokens: int, sequence_length: int, num_samples: int | None) -> OrderShape:
    """The numbers of an order that holds at least `num_samples` samples; None asks for one epoch."""
    wanted = 1 if num_samples is None else -(-(num_samples * sequence_length + SHARED) // epoch_tokens)
    epochs = max(wanted, 1)
    samples = (epochs * epoch_tokens - SHARED) // sequence_length
    if epochs == 1 or num_samples is None:
        return OrderShape(epochs, samples, 0, last_apart=False)
    before_last = ((epochs - 1) * epoch_tokens - SHARED) // sequence_length
    per_epoch = (epoch_tokens - SHARED) // sequence_length
    return OrderShape(
        epochs, samples, before_last, num_samples - before_last < int(_LAST_EPOCH_APART_BELOW * per_epoch)
    )


def sample_order(
    lengths: NDArray[np.int32],
    sequences: range,
    sequence_length: int,
    num_samples: int | None,
    random: np.random.RandomState,
) -> SampleOrder:
    """Megatron's three indices for the given sequences; `num_samples` None asks for one epoch.

    `lengths` [num_sequences] are the tokens of every sequence in the file. The order holds at least
    `num_samples` samples. The draws from `random` (documents first, then samples) are Megatron's.
    """
    epoch_tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    shape = order_shape(epoch_tokens, sequence_length, num_samples)
    documents = _shuffled_documents(sequences, shape.epochs, shape.last_apart, random)
    starts = sample_starts(lengths, documents, shape.samples, sequence_length)
    shuffle = np.arange(shape.samples, dtype=np.uint32 if shape.samples < 2**32 - 2 else np.int64)
    if shape.last_apart:
        random.shuffle(shuffle[: shape.before_last])
        random.shuffle(shuffle[shape.before_last :])
    else:
        random.shuffle(shuffle)
    return SampleOrder(documents, starts, shuffle)


def _shuffled_documents(sequences: range, epochs: int, apart: bool, random: np.random.RandomState) -> NDArray[np.int32]:
    one = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    if not apart:
        documents = np.tile(one, epochs)
        random.shuffle(documents)
        return documents
    first = np.tile(one, epochs - 1)
    random.shuffle(first)
    random.shuffle(one)
    return np.concatenate([first, one])


def sample_starts(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], samples: int, sequence_length: int
) -> NDArray[Any]:
    """Where samples 0 to `samples` begin in the joined `documents`: pairs (place in `documents`, token there).

    Sample k begins at token k * sequence_length of the stream, in the last document that begins at or
    before it: documents without tokens are stepped over, as Megatron's loop does. Worked out for blocks of
    documents that stay in a processor's cache, in arrays that all blocks share.
    """
    longest = int(lengths.max(initial=0))
    narrow = max(len(documents), longest) < 2**31
    starts = np.zeros((samples + 1, 2), np.int32 if narrow else np.int64)
    block = _Block(starts, sequence_length, longest)
    before = 0
    for first in range(0, len(documents), block.size):
        before += block.fill(first, before, lengths, documents[first : first + block.size])
    return starts


class _Block:
    """Sets the rows of `starts` for `size` documents at a time.

    The numbers within a block are of 32 bits where they fit, of which numpy computes twice as many at a time.
    """

    def __init__(self, starts: NDArray[Any], sequence_length: int, longest: int) -> None:
        self._starts, self._sequence_length = starts, sequence_length
        fitting = (2**32 - 2 * sequence_length) // max(longest, 1)
        self.size = min(fitting, _BLOCK) if fitting >= _SMALLEST_BLOCK else _BLOCK
        number = np.uint32 if fitting >= _SMALLEST_BLOCK else np.int64
        self._lengths = np.empty(self.size, np.int32)
        self._ends = np.empty(self.size, number)
        self._begun = np.empty(self.size + 1, number)

    def fill(self, first: int, before: int, lengths: NDArray[np.int32], documents: NDArray[np.int32]) -> int:
        """The tokens of these documents, of which `first` is the place of the first, `before` tokens into the stream.

        Row 0 stays (0, 0) even if the first documents are empty, as in Megatron.
        """
        sequence_length = self._sequence_length
        passed, phase = divmod(before, sequence_length)
        done = max(passed + bool(phase), 1)
        # All numbers are in range: of the modes, clip checks least.
        taken = lengths.take(documents, mode="clip", out=self._lengths[: len(documents)])
        taken = taken.view(np.uint32) if self._ends.dtype == np.uint32 else taken.astype(np.int64)
        # So much is added to every end that a division rounds up: to the samples that begin before it.
        added = phase + sequence_length - 1
        taken[0] += added
        ends = np.cumsum(taken, dtype=taken.dtype, out=self._ends[: len(taken)])
        taken[0] -= added
        begun = np.floor_divide(ends, sequence_length, out=self._begun[1 : len(ends) + 1])
        if not before:
            np.maximum(begun, 1, out=begun)
        stop = min(passed + int(begun[-1]), len(self._starts))
        if stop > done:
            found = self._found(begun, done - passed, stop - passed)
            tokens = sequence_length * np.arange(done, stop) + (added - before)
            tokens -= np.subtract(ends, taken, out=taken).take(found)
            self._starts[done:stop, 1] = tokens
            found += first
            self._starts[done:stop, 0] = found
        return int(ends[-1]) - added

    def _found(self, begun: NDArray[Any], done: int, stop: int) -> NDArray[np.intp]:
        """The documents in which samples `done` to `stop` begin; `begun` of them begin before the end of each."""
        if 2 * (stop - done) > len(begun):  # one that ends before a sample begins is passed by it
            passed: NDArray[np.intp] = np.bincount(begun, minlength=stop)[:stop]
            return np.cumsum(passed, out=passed)[done:]
        self._begun[0] = done
        found = np.flatnonzero(begun != self._begun[: len(begun)])
        if len(found) < stop - done:  # some hold several
            found = np.repeat(found, begun.take(found) - self._begun.take(found))
        return found[: stop - done]


def kept_order(
    folder: Path | None,
    lengths: NDArray[np.int32],
    sequences: range,
    sequence_length: int,
    num_samples: int | None,
    seed: int | Sequence[int],
) -> SampleOrder:
    """`sample_order` with a fresh generator of `seed`; a large one is made once in `folder` and then mapped.

    Any process may make it: one does, others wait for it. Where the folder cannot be written the order is
    made in memory; it is the same.
    """

    def made() -> SampleOrder:
        return sample_order(lengths, sequences, sequence_length, num_samples, np.random.RandomState(seed))

    part = lengths[sequences.start : sequences.stop]
    shape = order_shape(int(part.sum(dtype=np.int64)), sequence_length, num_samples)
    if folder is None or shape.epochs * len(sequences) + shape.samples < KEPT_FROM:
        return made()
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
        order = made()
        for field in fields(SampleOrder):
            np.save(unfinished / f"{field.name}.npy", getattr(order, field.name), allow_pickle=False)
        (unfinished / "inputs.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    try:
        return _mapped(cached_directory(folder, key, build, lambda found: _is_intact(found, shape), lambda: None))
    except (DataError, OSError, ValueError):  # a full or read-only disk
        return made()


def _mapped(directory: Path) -> SampleOrder:
    arrays = (np.load(directory / f"{f.name}.npy", mmap_mode="r", allow_pickle=False) for f in fields(SampleOrder))
    # A plain array over the map: slices of np.memmap itself are several times slower.
    return SampleOrder(*(np.asarray(array) for array in arrays))


def _is_intact(directory: Path, shape: OrderShape) -> bool:
    try:
        order = _mapped(directory)
    except (OSError, ValueError):
        return False
    return order.starts.shape == (shape.samples + 1, 2) and order.shuffle.shape == (shape.samples,)
