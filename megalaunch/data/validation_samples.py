"""Validation samples: every token of the text predicted exactly once, in order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.indexed import IndexedTokens


class ValidationSamples:
    """Rows of `sequence_length + 1` tokens that overlap by one, over all sequences joined as they stand.

    So each token but the very first is a label once, and a mean over the valid labels is the mean over
    the text whatever the batch. The last row is padded with its last token, and invalid there.
    `sequences` limits the rows to a part of the file (a split). Raises DataError as GPTSamples does.
    """

    def __init__(
        self, prefix: Path, sequence_length: int, sequences: range | None = None, vocab_size: int | None = None
    ) -> None:
        self.file = IndexedTokens(prefix)
        self.sequence_length, self.vocab_size = sequence_length, vocab_size
        part = range(self.file.num_sequences) if sequences is None else sequences
        self._first, self._end = self.file.first_token(part.start), self.file.first_token(part.stop)
        self.num_tokens = self._end - self._first

    def __len__(self) -> int:
        return max(0, -(-(self.num_tokens - 1) // self.sequence_length))

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Row `index`: tokens int64 [S + 1], and bool [S], true where the label (token i + 1) counts."""
        if not 0 <= index < len(self):
            raise IndexError(f"validation row {index} of {len(self)}")
        start = self._first + index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self._end)
        tokens = self.file.stream[start:stop].astype(np.int64)
        if self.vocab_size is not None and (tokens.max() >= self.vocab_size or tokens.min() < 0):
            wrong = (tokens >= self.vocab_size) | (tokens < 0)
            raise DataError(
                f"token {start + int(wrong.argmax())} is {tokens[wrong][0]}, "
                f"the vocabulary has {self.vocab_size:,} entries",
                file=self.file.prefix,
                fix="Evaluate with the tokenizer that made these files, or make the files anew.",
            )
        missing = self.sequence_length + 1 - len(tokens)
        valid = np.arange(self.sequence_length) < len(tokens) - 1
        return np.pad(tokens, (0, missing), mode="edge"), valid
