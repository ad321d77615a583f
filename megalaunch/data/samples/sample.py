"""One sample: token ids, loss mask, position ids and document ids.

The loss mask is made in three places of this package: `EodPolicy.make_sample` below masks the loss after each
end-of-document token (`data.eod_mask_loss`), `ConversationFile.sample` (chat_dataset.py) keeps only tokens of answers,
which preprocess/chat/build.py marked, and `ValidationSamples` (validation_dataset.py) masks the padding of its last
row. In engine/train, evaluate.py masks rows that only fill up the last batch, row_scorer.py all tokens but those to be
scored, and the data loader (dataloader.py) replaces masked labels by `IGNORE_INDEX`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """S + 1 token ids: the first S are the inputs, the last S the labels.

    Attributes:
        tokens: int64 [S + 1].
        loss_mask: bool [S], True where the label counts in the loss; None: all labels count.
        positions: int64 [S] position ids; None: 0 to S - 1.
        document_ids: int64 [S]; the attention mask lets an input attend only to inputs of the same id. None: one
            document.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    document_ids: NDArray[np.int64] | None = None


class TokenDataset(Protocol):
    """An endless sequence of token samples, int64 [S + 1]; `len()` is the number requested, or slightly more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...

    def describe(self, index: int) -> str: ...


class Dataset(Protocol):
    """An endless sequence of samples that it can describe; `len()` is the number requested, or slightly more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class EodPolicy:
    """How to treat documents that end inside a sample: Megatron's flags of the same names.

    Attributes:
        eod: id of the end-of-document token, the last token of each document.
        reset_position_ids: position ids restart at 0 after each `eod`.
        reset_attention_mask: tokens attend only within their document.
        eod_mask_loss: mask the loss where the input is `eod`, i.e. of predicting the next document's first token.
    """

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def make_sample(self, tokens: NDArray[np.int64], loss_mask: NDArray[np.bool_] | None = None) -> Sample:
        """Build the sample of S + 1 tokens with its loss mask, position ids and document ids.

        Args:
            tokens: int64 [S + 1].
            loss_mask: bool [S], a mask to combine with that of `eod_mask_loss`; None: all labels count.
        """
        inputs = tokens[:-1]
        ends = inputs == self.eod
        positions = documents = None
        if self.eod_mask_loss:
            loss_mask = ~ends if loss_mask is None else loss_mask & ~ends
        if self.reset_attention_mask:
            documents = np.zeros(len(inputs), np.int64)
            np.cumsum(ends[:-1], out=documents[1:])
        if self.reset_position_ids:
            positions = positions_within(ends)
        return Sample(tokens, loss_mask, positions, documents)


def positions_within(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return position ids [S] that restart at 0 after each True entry of `ends` [S]."""
    positions = np.arange(len(ends), dtype=np.int64)
    begins = np.zeros(len(ends), np.int64)
    begins[1:] = np.where(ends[:-1], positions[1:], 0)
    return positions - np.maximum.accumulate(begins)
