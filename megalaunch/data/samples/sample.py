"""One row of a batch: token ids, which labels count, and where one document ends and the next begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sample:
    """S + 1 token ids: the first S are the input, the last S the labels.

    `counted` bool [S]: labels with a loss, None for all. `positions` int64 [S]: None for 0 to S - 1.
    `documents` int64 [S]: inputs see only inputs of the same number, None for no such limit.
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
    """An endless order of rows, and where each comes from; `len()` is what was asked for, or a little more."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class EodPolicy:
    """What the end of a document inside a row means: the rules of Megatron's flags of the same names.

    A document ends with its token `eod`, which belongs to it still.
    """

    eod: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_eod_loss: bool = False

    def make_sample(self, tokens: NDArray[np.int64], counted: NDArray[np.bool_] | None = None) -> Sample:
        """The row of S + 1 tokens; `counted` bool [S] says which labels count before the rules."""
        inputs = tokens[:-1]
        ends = inputs == self.eod
        positions = documents = None
        if self.mask_eod_loss:
            counted = ~ends if counted is None else counted & ~ends
        if self.reset_attention:
            documents = np.zeros(len(inputs), np.int64)
            np.cumsum(ends[:-1], out=documents[1:])
        if self.reset_positions:
            positions = positions_within(ends)
        return Sample(tokens, counted, positions, documents)


def positions_within(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions [S] that start again at 0 after each true entry of `ends` [S]."""
    positions = np.arange(len(ends), dtype=np.int64)
    begins = np.zeros(len(ends), np.int64)
    begins[1:] = np.where(ends[:-1], positions[1:], 0)
    return positions - np.maximum.accumulate(begins)
