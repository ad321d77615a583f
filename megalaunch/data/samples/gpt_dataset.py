"""Training samples of one token file in the order of Megatron's `GPTDataset`, index by index.

Indices past its end are valid: more epochs follow, and the samples before them do not change.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens, TokenReader, bin_path
from megalaunch.data.samples.gpt_index import EXTRA_TOKEN, GPTIndex, load_or_build_index

_PIECES_DESCRIBED = 6
_EXTENSIONS_KEPT = 2


class GPTDataset:
    """Samples of `sequence_length + 1` tokens: the first S are the inputs, the last S the labels.

    `len()` is the number of samples of Megatron's indices for `num_samples`, at least `num_samples`. Indices past
    it are valid: further epochs follow, each shuffled with a generator seeded with (seed, extension number), so
    that a longer run reads the same samples first.

    Args:
        prefix: token file, without .bin and .idx.
        sequence_length: S.
        num_samples: number of samples requested; None: one epoch.
        seed: seed of the document and shuffle index.
        sequences: the sequences to sample from (a split); None: all.
        vocab_size: token ids are checked against it; None: not checked.
        cache: directory for large indices; None: built in memory.

    Raises:
        DataError: the files are unusable, hold too few tokens for one sample, or (on reading) an id is out of range.
    """

    def __init__(
        self,
        prefix: Path,
        sequence_length: int,
        num_samples: int | None,
        seed: int,
        sequences: range | None = None,
        vocab_size: int | None = None,
        cache: Path | None = None,
    ) -> None:
        self.file = IndexedTokens(prefix)
        self._reader = TokenReader(bin_path(prefix), self.file.dtype)
        self._cache = cache
        self.sequence_length, self.seed, self.vocab_size = sequence_length, seed, vocab_size
        self.sequences = range(self.file.num_sequences) if sequences is None else sequences
        self.epoch_tokens = self.file.tokens_in(self.sequences)
        if self.epoch_tokens == 0:
            raise DataError("it has no tokens to train on", file=prefix)
        self.order = self._build_index(num_samples, seed)
        if len(self) == 0:
            raise DataError(
                f"its {self.epoch_tokens:,} tokens are too few for one sample of {sequence_length + EXTRA_TOKEN:,}",
                file=prefix,
                fix="Give more text or a shorter batch.sequence_length.",
            )
        self._extensions: OrderedDict[int, GPTIndex] = OrderedDict()
        # An extension has as many epochs as are needed for at least one sample.
        tokens = sequence_length + EXTRA_TOKEN
        self._extension_samples = (-(-tokens // self.epoch_tokens) * self.epoch_tokens - EXTRA_TOKEN) // sequence_length

    def __len__(self) -> int:
        return len(self.order.shuffle)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index`, int64 [sequence_length + 1]."""
        order, place = self._place(index)
        pieces = [self._read(*piece) for piece in self._document_spans(order, place)]
        tokens = np.concatenate(pieces).astype(np.int64)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            raise self._out_of_vocab_error(order, place)
        return tokens

    def describe(self, index: int) -> str:
        """Return one line for reports: the documents and token ranges of sample `index`."""
        order, place = self._place(index)
        pieces = self._document_spans(order, place)
        shown = [f"{sequence} tokens {start}-{stop - 1}" for sequence, start, stop in pieces[:_PIECES_DESCRIBED]]
        more = f" and {len(pieces) - len(shown)} more" if len(pieces) > len(shown) else ""
        return f"sample {index} of {self.file.prefix.name}: documents {', '.join(shown)}{more}"

    def _build_index(self, num_samples: int | None, seed: int | list[int]) -> GPTIndex:
        return load_or_build_index(
            self._cache, self.file.lengths, self.sequences, self.sequence_length, num_samples, seed
        )

    def _read(self, sequence: int, start: int, stop: int) -> NDArray[Any]:
        return self._reader.read(self.file.first_token(sequence) + start, stop - start)

    def _place(self, index: int) -> tuple[GPTIndex, int]:
        """Return the indices that contain sample `index`, and its row in the sample index."""
        if index < 0:
            raise IndexError(f"sample {index}: samples count from 0")
        if index < len(self):
            return self.order, int(self.order.shuffle[index])
        number, inside = divmod(index - len(self), self._extension_samples)
        order = self._extension(number)
        return order, int(order.shuffle[inside])

    def _extension(self, number: int) -> GPTIndex:
        """Return the indices of extension `number`; the last `_EXTENSIONS_KEPT` stay in memory."""
        if number not in self._extensions:
            self._extensions[number] = self._build_index(self._extension_samples, [self.seed, number])
            if len(self._extensions) > _EXTENSIONS_KEPT:
                self._extensions.popitem(last=False)
        return self._extensions[number]

    def _document_spans(self, order: GPTIndex, place: int) -> list[tuple[int, int, int]]:
        """Return (sequence, first token, end) of each non-empty part of a sample."""
        (first, offset), (last, shared) = order.sample_index[place].tolist(), order.sample_index[place + 1].tolist()
        pieces = []
        for position in range(first, last + 1):
            sequence = int(order.documents[position])
            start = offset if position == first else 0
            stop = shared + EXTRA_TOKEN if position == last else int(self.file.lengths[sequence])
            if stop > start:
                pieces.append((sequence, start, stop))
        return pieces

    def _out_of_vocab_error(self, order: GPTIndex, place: int) -> DataError:
        """Locate the first token id outside the vocabulary in a sample."""
        for sequence, start, stop in self._document_spans(order, place):
            tokens = self._read(sequence, start, stop)
            wrong = (tokens >= self.vocab_size) | (tokens < 0)
            if wrong.any():
                break
        at = int(wrong.argmax())
        return DataError(
            f"token {start + at} of document {sequence} is {tokens[at]}, "
            f"the vocabulary has {self.vocab_size:,} entries",
            file=self.file.prefix,
            fix="Train with the tokenizer that encoded these files, or run `megalaunch preprocess` again.",
        )
