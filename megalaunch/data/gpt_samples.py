"""Training samples in Megatron's order: documents shuffled, joined, cut into samples, samples shuffled.

The order is a pure function of (files, sequence length, requested samples, seed), equal to Megatron's
`GPTDataset` index by index. Past its end it goes on, and never changes what was given before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.indexed import IndexedTokens

# A sample shares its last token with the next one: it is the last label here and the first input there.
_SHARED = 1
# Megatron shuffles the last epoch apart from the others when less than this share of it is needed.
_LAST_EPOCH_APART_BELOW = 0.80
_PIECES_DESCRIBED = 6
_EXTENSIONS_KEPT = 2


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
    wanted = 1 if num_samples is None else -(-(num_samples * sequence_length + _SHARED) // epoch_tokens)
    epochs = max(wanted, 1)
    whole = (epochs * epoch_tokens - _SHARED) // sequence_length
    before_last = ((epochs - 1) * epoch_tokens - _SHARED) // sequence_length if epochs > 1 else 0
    apart = False
    if epochs > 1 and num_samples is not None:
        per_epoch = (epoch_tokens - _SHARED) // sequence_length
        apart = num_samples - before_last < int(_LAST_EPOCH_APART_BELOW * per_epoch)
    documents = _shuffled_documents(sequences, epochs, apart, random)
    starts = _sample_starts(lengths[documents], whole, sequence_length)
    shuffle = np.arange(whole, dtype=np.uint32 if whole < 2**32 - 2 else np.int64)
    if apart:
        random.shuffle(shuffle[:before_last])
        random.shuffle(shuffle[before_last:])
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


def _sample_starts(lengths: NDArray[np.int32], samples: int, sequence_length: int) -> NDArray[Any]:
    """Where samples 0 to `samples` begin in the joined documents, each found by one binary search.

    Sample k begins at token k * sequence_length of the stream, in the last document that begins at or
    before it: documents without tokens are stepped over, as Megatron's loop does.
    """
    begins = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], out=begins[1:], dtype=np.int64)
    longest = int(lengths.max(initial=0))
    starts = np.zeros((samples + 1, 2), np.int32 if max(len(lengths), longest) < 2**31 else np.int64)
    # Row 0 stays (0, 0) even if the first documents are empty: so it is in Megatron's files.
    positions = np.arange(1, samples + 1, dtype=np.int64) * sequence_length
    found = np.searchsorted(begins, positions, side="right") - 1
    starts[1:, 0] = found
    starts[1:, 1] = positions - begins[found]
    return starts


class GPTSamples:
    """Samples of `sequence_length + 1` tokens: the first S are the input, the last S the labels.

    `len()` is what Megatron's order for `num_samples` holds, at least `num_samples`. Indices past it are
    legal: further epochs follow, each with its own shuffle drawn from (seed, its number), so that a longer
    run meets the same samples first. `sequences` limits the samples to a part of the file (a split).
    Raises DataError for unusable files, and for a token that is no id of a vocabulary of `vocab_size`.
    """

    def __init__(
        self,
        prefix: Path,
        sequence_length: int,
        num_samples: int | None,
        seed: int,
        sequences: range | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.file = IndexedTokens(prefix)
        self.sequence_length, self.seed, self.vocab_size = sequence_length, seed, vocab_size
        self.sequences = range(self.file.num_sequences) if sequences is None else sequences
        self.epoch_tokens = self.file.tokens_in(self.sequences)
        if self.epoch_tokens == 0:
            raise DataError("it holds no tokens to train on", file=prefix)
        self.order = self._draw(num_samples, np.random.RandomState(seed))
        if len(self) == 0:
            raise DataError(
                f"its {self.epoch_tokens:,} tokens do not fill one sample of {sequence_length + _SHARED:,}",
                file=prefix,
                fix="Give more text or a shorter model.sequence_length.",
            )
        self._extensions: OrderedDict[int, SampleOrder] = OrderedDict()
        # An extension holds as many epochs as it takes to fill at least one sample.
        tokens = sequence_length + _SHARED
        self._extension_samples = (-(-tokens // self.epoch_tokens) * self.epoch_tokens - _SHARED) // sequence_length

    def __len__(self) -> int:
        return len(self.order.shuffle)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The tokens of sample `index`, int64 [sequence_length + 1]."""
        order, place = self._place(index)
        pieces = [self.file.tokens(*piece) for piece in self._pieces(order, place)]
        tokens = np.concatenate(pieces).astype(np.int64)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            raise self._beyond_vocabulary(order, place)
        return tokens

    def describe(self, index: int) -> str:
        """Where the tokens of sample `index` stand in the file: for reports, a line however many pieces."""
        order, place = self._place(index)
        pieces = self._pieces(order, place)
        shown = [f"{sequence} tokens {start}-{stop - 1}" for sequence, start, stop in pieces[:_PIECES_DESCRIBED]]
        more = f" and {len(pieces) - len(shown)} more" if len(pieces) > len(shown) else ""
        return f"sample {index} of {self.file.prefix.name}: documents {', '.join(shown)}{more}"

    def _draw(self, num_samples: int | None, random: np.random.RandomState) -> SampleOrder:
        return sample_order(self.file.lengths, self.sequences, self.sequence_length, num_samples, random)

    def _place(self, index: int) -> tuple[SampleOrder, int]:
        """The order that holds `index`, and the sample's place in it before the shuffle."""
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0")
        if index < len(self):
            return self.order, int(self.order.shuffle[index])
        number, inside = divmod(index - len(self), self._extension_samples)
        order = self._extension(number)
        return order, int(order.shuffle[inside])

    def _extension(self, number: int) -> SampleOrder:
        if number not in self._extensions:
            random = np.random.RandomState([self.seed, number])
            self._extensions[number] = self._draw(self._extension_samples, random)
            if len(self._extensions) > _EXTENSIONS_KEPT:
                self._extensions.popitem(last=False)
        return self._extensions[number]

    def _pieces(self, order: SampleOrder, place: int) -> list[tuple[int, int, int]]:
        """(sequence, first token, end) of each piece of a sample that has tokens."""
        (first, offset), (last, shared) = order.starts[place].tolist(), order.starts[place + 1].tolist()
        pieces = []
        for position in range(first, last + 1):
            sequence = int(order.documents[position])
            start = offset if position == first else 0
            stop = shared + _SHARED if position == last else int(self.file.lengths[sequence])
            if stop > start:
                pieces.append((sequence, start, stop))
        return pieces

    def _beyond_vocabulary(self, order: SampleOrder, place: int) -> DataError:
        for sequence, start, stop in self._pieces(order, place):
            tokens = self.file.tokens(sequence, start, stop)
            wrong = (tokens >= self.vocab_size) | (tokens < 0)
            if wrong.any():
                break
        at = int(wrong.argmax())
        return DataError(
            f"token {start + at} of document {sequence} is {tokens[at]}, "
            f"the vocabulary has {self.vocab_size:,} entries",
            file=self.file.prefix,
            fix="Train with the tokenizer that made these files, or make the files anew.",
        )
