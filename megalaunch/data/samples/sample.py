"""One sample: token ids, the loss mask, and where one document ends and the next begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """S + 1 token ids: the first S are the input, the last S the labels.

    `loss_mask` bool [S]: labels with a loss, None for all. `positions` int64 [S]: None for 0 to S - 1.
    `document_ids` int64 [S]: inputs attend only to inputs of the same id, None for no such limit.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_] | None = None
    positions: NDArray[np.int64] | None = None
    document_ids: NDArray[np.int64] | None = None


class TokenDataset(Protocol):
    """An endless order of samples of S + 1 tokens; `len()` is what was asked for, or a little more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray[np.int64]: ...

    def describe(self, index: int) -> str: ...


class Dataset(Protocol):
    """An endless order of samples, and where each comes from; `len()` is what was asked for, or a little more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class EodPolicy:
    """What the end of a document inside a sample means: the rules of Megatron's flags of the same names.

    A document ends with its token `eod`, which belongs to it still.
    """

    eod: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def make_sample(self, tokens: NDArray[np.int64], loss_mask: NDArray[np.bool_] | None = None) -> Sample:
        """The sample of S + 1 tokens; `loss_mask` bool [S] is the mask before the rules."""
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
    """Positions [S] that start again at 0 after each true entry of `ends` [S]."""
    positions = np.arange(len(ends), dtype=np.int64)
    begins = np.zeros(len(ends), np.int64)
    begins[1:] = np.where(ends[:-1], positions[1:], 0)
    return positions - np.maximum.accumulate(begins)
