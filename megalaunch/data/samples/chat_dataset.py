"""Packed conversations: each attends only to itself, and only answers count in the loss.

Sequence packing places truncated conversations in rows of a fixed length with little padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import REMAKE, IndexedTokens, TokenReader, bin_path
from megalaunch.data.prepared_files import loss_mask_prefix
from megalaunch.data.samples.sample import Sample

_EPOCHS_KEPT = 2
_CONVERSATIONS_DESCRIBED = 6
# Conversations packed at a time: enough that rows are nearly full, few enough that the order stays random.
_WINDOW = 1024


class ConversationFile:
    """The conversations of one prefix, and the packing of some of them into a sample.

    A conversation longer than a row is truncated; one without an answer in the remaining part is left out.
    """

    def __init__(self, prefix: Path, sequence_length: int, vocab_size: int | None = None) -> None:
        self.prefix, self.sequence_length, self._vocab_size = prefix, sequence_length, vocab_size
        self._file, self._marks = IndexedTokens(prefix), IndexedTokens(loss_mask_prefix(prefix))
        if not np.array_equal(self._file.lengths, self._marks.lengths):
            raise DataError("its loss mask does not match its conversations", file=prefix, fix=REMAKE)
        self._tokens = TokenReader(bin_path(prefix), self._file.dtype)
        self._answers = TokenReader(bin_path(loss_mask_prefix(prefix)), self._marks.dtype)
        self.numbers = np.array([n for n in range(self._file.num_sequences) if self._has_answer(n)], np.int64)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each conversation before truncation, int32."""
        return self._file.lengths

    def sample(self, numbers: list[int]) -> Sample:
        """Pack conversations into one sample: loss mask from the answers file, position ids restart in each.

        The rest of the row is padding with a document id of its own and a loss mask of False.
        """
        size = self.sequence_length + 1
        tokens, counted = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        positions, documents = np.arange(size, dtype=np.int64), np.full(size, len(numbers), np.int64)
        at = 0
        for place, number in enumerate(numbers):
            part = slice(at, at + self._select(number))
            first, length = self._file.first_token(number), part.stop - part.start
            tokens[part] = self._tokens.read(first, length)
            counted[part] = self._answers.read(first, length)
            counted[at] = False  # the first token has no preceding token to be predicted from
            documents[part] = place
            positions[part] = np.arange(length)
            at = part.stop
        positions[at:] = np.arange(size - at)
        self._check(tokens[:at], numbers)
        # The loss mask belongs to the labels, tokens[1:]; position and document ids belong to the inputs, tokens[:-1].
        return Sample(tokens, counted[1:], positions[:-1], documents[:-1])

    def describe(self, numbers: list[int]) -> str:
        """Return the conversation numbers as text, for reports."""
        more = len(numbers) - _CONVERSATIONS_DESCRIBED
        shown = ", ".join(str(number) for number in numbers[:_CONVERSATIONS_DESCRIBED])
        return f"conversations {shown} of {self.prefix.name}" + (f" and {more} more" if more > 0 else "")

    def _select(self, number: int) -> int:
        """Return the number of tokens of a conversation after truncation."""
        return min(int(self._file.lengths[number]), self.sequence_length + 1)

    def _has_answer(self, number: int) -> bool:
        return bool(self._answers.read(self._file.first_token(number), self._select(number))[1:].any())

    def _check(self, tokens: NDArray[np.int64], numbers: list[int]) -> None:
        if self._vocab_size is not None and tokens.size and tokens.max() >= self._vocab_size:
            raise DataError(
                f"a token of {self.describe(numbers)} is {tokens.max()}, "
                f"the vocabulary has {self._vocab_size:,} entries",
                file=self.prefix,
                fix="Train with the tokenizer that encoded these files.",
            )


class PackedChatDataset:
    """Endless epochs of all conversations, each shuffled and packed with a generator seeded with (seed, epoch)."""

    def __init__(self, conversations: ConversationFile, seed: int) -> None:
        if len(conversations.numbers) == 0:
            raise DataError(
                f"no conversation has an answer within its first {conversations.sequence_length + 1:,} tokens",
                file=conversations.prefix,
                fix="Give a longer batch.sequence_length, or conversations with answers.",
            )
        self._conversations, self._seed = conversations, seed
        self._epochs: OrderedDict[int, list[list[int]]] = OrderedDict()
        self._ends = [len(self._epoch(0))]  # cumulative number of rows at the end of each epoch packed so far

    def __len__(self) -> int:
        """Return the rows of the first epoch; indices past it are valid."""
        return self._ends[0]

    def __getitem__(self, index: int) -> Sample:
        """Return row `index`."""
        return self._conversations.sample(self._numbers(index))

    def describe(self, index: int) -> str:
        """Return one line for reports: the conversations in row `index`."""
        return f"row {index}: {self._conversations.describe(self._numbers(index))}"

    def _numbers(self, index: int) -> list[int]:
        """Return the conversation numbers of row `index`."""
        if index < 0:
            raise IndexError(f"row {index}: rows count from 0")
        while self._ends[-1] <= index:
            self._ends.append(self._ends[-1] + len(self._epoch(len(self._ends))))
        epoch = int(np.searchsorted(self._ends, index, side="right"))
        return self._epoch(epoch)[index - (self._ends[epoch - 1] if epoch else 0)]

    def _epoch(self, number: int) -> list[list[int]]:
        """Return the rows of an epoch; the last `_EPOCHS_KEPT` stay in memory."""
        if number not in self._epochs:
            random = np.random.RandomState([self._seed, number])
            order = random.permutation(self._conversations.numbers)
            rows = pack(self._conversations.lengths, self._conversations.sequence_length + 1, order)
            self._epochs[number] = [rows[place] for place in random.permutation(len(rows))]
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[number]


class ChatValidationDataset:
    """Every conversation once, packed in file order; limited to about `most_tokens` tokens."""

    def __init__(self, conversations: ConversationFile, most_tokens: int | None) -> None:
        self._conversations = conversations
        numbers = conversations.numbers
        if most_tokens is not None:
            ends = np.cumsum(np.minimum(conversations.lengths[numbers], conversations.sequence_length + 1))
            numbers = numbers[: max(1, int(np.searchsorted(ends, most_tokens, side="right")))]
        self._rows = pack(conversations.lengths, conversations.sequence_length + 1, numbers)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        """Return row `index`."""
        return self._conversations.sample(self._rows[index])


def pack(lengths: Sequence[int] | NDArray[np.integer], capacity: int, order: NDArray[np.int64]) -> list[list[int]]:
    """Pack conversations into rows by best-fit decreasing, within windows of `order`.

    Args:
        lengths: tokens of each conversation; longer ones count as `capacity`.
        capacity: tokens of a row.
        order: numbers of the conversations to pack. In each window of 1,024 the longest is placed first, in the
            fullest row that has room.

    Returns:
        The conversation numbers of each row; each number appears once, and no row exceeds `capacity` tokens.
    """
    rows: list[list[int]] = []
    for start in range(0, len(order), _WINDOW):
        window = order[start : start + _WINDOW].tolist()
        window.sort(key=lambda number: -min(int(lengths[number]), capacity))
        rows += _best_fit(window, lengths, capacity)
    return rows


def _best_fit(numbers: list[int], lengths: Sequence[int] | NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Pack `numbers`, longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for number in numbers:
        length = min(int(lengths[number]), capacity)
        place = bisect_left(free, (length, -1))
        if place < len(free):
            room, row = free.pop(place)
            rows[row].append(number)
        else:
            room, row = capacity, len(rows)
            rows.append([number])
        insort(free, (room - length, row))
    return rows
