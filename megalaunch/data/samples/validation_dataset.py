"""Validation samples: every token of the text is predicted exactly once, in order, in one file or several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens, TokenReader, bin_path
from megalaunch.data.samples.blended_dataset import normalize_weights
from megalaunch.data.samples.sample import EodPolicy, Sample


class FiniteDataset(Protocol):
    """A dataset that is read completely, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class ValidationSamples:
    """Rows of `sequence_length + 1` tokens that overlap by one token, over all sequences concatenated.

    So each token except the very first is a label once, and the mean over unmasked labels is the mean over the text,
    whatever the batch size. The last row is padded with its last token; the loss mask excludes the padding.

    Args:
        prefix: token file, without .bin and .idx.
        sequence_length: S.
        sequences: the sequences to read (a split); None: all.
        vocab_size: token ids are checked against it; None: not checked.
        most_tokens: read only this many tokens from the start; None: all.
        eod_policy: how to treat ends of documents; None: as any token.

    Raises:
        DataError: the files are unusable, or (on reading) an id is out of range.
    """

    def __init__(
        self,
        prefix: Path,
        sequence_length: int,
        sequences: range | None = None,
        vocab_size: int | None = None,
        most_tokens: int | None = None,
        eod_policy: EodPolicy | None = None,
    ) -> None:
        self.file, self._eod_policy = IndexedTokens(prefix), eod_policy
        self._reader = TokenReader(bin_path(prefix), self.file.dtype)
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        part = range(self.file.num_sequences) if sequences is None else sequences
        self._first, self._end = self.file.first_token(part.start), self.file.first_token(part.stop)
        if most_tokens is not None:
            self._end = min(self._end, self._first + most_tokens)
        self.num_tokens = self._end - self._first

    def __len__(self) -> int:
        return max(0, -(-(self.num_tokens - 1) // self.sequence_length))

    def __getitem__(self, index: int) -> Sample:
        """Return row `index`; the loss mask is False past the end of the text."""
        if not 0 <= index < len(self):
            raise IndexError(f"validation row {index} of {len(self)}")
        start = self._first + index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self._end)
        tokens = self._reader.read(start, stop - start).astype(np.int64)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            wrong = (tokens >= self.vocab_size) | (tokens < 0)
            raise DataError(
                f"token {start + int(wrong.argmax())} is {tokens[wrong][0]}, "
                f"the vocabulary has {self.vocab_size:,} entries",
                file=self.file.prefix,
                fix="Evaluate with the tokenizer that encoded these files, or run `megalaunch preprocess` again.",
            )
        missing = self.sequence_length + 1 - len(tokens)
        counted = np.arange(self.sequence_length) < len(tokens) - 1
        padded = np.pad(tokens, (0, missing), mode="edge")
        return Sample(padded, counted) if self._eod_policy is None else self._eod_policy.make_sample(padded, counted)


class ConcatDataset:
    """The rows of several datasets, one after the other."""

    def __init__(self, parts: Sequence[FiniteDataset]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return row `index` of the concatenation."""
        if not 0 <= index < len(self):
            raise IndexError(f"validation row {index} of {len(self)}")
        part = bisect_right(self._ends, index)
        return self._parts[part][index - (self._ends[part - 1] if part else 0)]


def num_tokens_in_slices(available: Sequence[int], weights: Sequence[float | None], limit: int | None) -> list[int]:
    """Return the number of tokens to validate on in each slice.

    Args:
        available: tokens of each slice.
        weights: blend weights, all given or all None. With weights the counts keep these proportions, so that the
            mean loss is the blend's, and are bounded by the slice that runs out first. Without weights all tokens
            are used, or `limit` in proportion to `available`.
        limit: maximum number of tokens in total; None: no limit.
    """
    total = sum(available)
    given = [weight for weight in weights if weight is not None]
    if given:
        shares = normalize_weights(given)
        most = min(count / share for count, share in zip(available, shares, strict=True))
        most = most if limit is None else min(most, limit)
    elif limit is None or limit >= total:
        return list(available)
    else:
        shares, most = normalize_weights(available), limit
    return [min(count, round(most * share)) for count, share in zip(available, shares, strict=True)]
