"""Fill-in-the-middle (Bavarian et al., 2022): part of the documents are reordered so that their middle comes last.

The choices, characters and all, are those of Megatron's FIM dataset; each sample has a generator of its own, so that
it is the same whatever was read before it. What is ours: special tokens stay (Megatron's decoding drops them, here each
counts as one character), and no part gets a space before it that the text has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.samples.sample import TokenDataset
from megalaunch.data.tokenizer.prefix_space import without_prefix_space
from megalaunch.data.tokenizer.tokenizer import Tokenizer

# Nothing in a tokenizer.json says which tokens mark the parts; these are the names that published models use.
_KNOWN_MARKS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<PRE>", "<MID>", "<SUF>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),
)
_STREAM = 0xF13  # sets these draws apart from others of the same seed
_UNREADABLE = "\ufffd"  # what a cut character decodes to


@dataclass(frozen=True)
class FIMTokens:
    """Ids of the tokens before the parts of a document, and of the one that ends it."""

    prefix: int
    middle: int
    suffix: int
    eod: int


def find_fim_tokens(tokenizer: Tokenizer, names: Sequence[str], eod: int, path: Path) -> FIMTokens:
    """The marks of a tokenizer: `names` for prefix, middle and suffix, or the first known ones that it has."""
    for candidate in (tuple(names),) if names else _KNOWN_MARKS:
        ids = [_token(tokenizer, name) for name in candidate]
        if len(ids) == 3 and all(len(tokens) == 1 for tokens in ids):
            (prefix,), (middle,), (suffix,) = ids
            return FIMTokens(prefix, middle, suffix, eod)
    looked = ", ".join(names) if names else " or ".join(marks[0] for marks in _KNOWN_MARKS)
    raise DataError(
        f"it has no tokens for fill-in-the-middle (looked for {looked})",
        file=path,
        fix="Set data.fim_tokens=[PREFIX,MIDDLE,SUFFIX] to three tokens of it, or data.fim_rate=0.",
    )


def _token(tokenizer: Tokenizer, name: str) -> list[int]:
    """The ids of a mark: what stands for it in a text, or an entry of the vocabulary that is in no text."""
    ids, entry = tokenizer.encode(name), tokenizer.token_id(name)
    return [entry] if len(ids) != 1 and entry is not None else ids


class FIMDataset:
    """The samples of `source`, in which a document (or the part of one that is there) may be reordered.

    With probability `rate` a document becomes prefix, suffix, middle (PSM), or with `spm_rate` of those suffix,
    prefix, middle (SPM). What does not fit any more is cut off; what is missing is filled with `marks.eod`.
    """

    def __init__(
        self, source: TokenDataset, tokenizer: Tokenizer, marks: FIMTokens, rate: float, spm_rate: float, seed: int
    ) -> None:
        self._source, self._tokenizer, self._marks = source, without_prefix_space(tokenizer), marks
        self._rate, self._spm_rate, self._seed = rate, spm_rate, seed

    def __len__(self) -> int:
        return len(self._source)

    def describe(self, index: int) -> str:
        """Where the tokens of sample `index` stand."""
        return self._source.describe(index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """The tokens of sample `index`, int64 [S + 1]."""
        random = np.random.RandomState([self._seed, _STREAM, *divmod(index, 2**32)])
        tokens = self._source[index]
        parts: list[NDArray[np.int64]] = []
        start = 0
        for end in np.flatnonzero(tokens == self._marks.eod).tolist():
            if end > start:
                parts.append(self._apply_fim(tokens[start:end], random))
            parts.append(tokens[end : end + 1])
            start = end + 1
        if start < len(tokens):
            parts.append(self._apply_fim(tokens[start:], random))
        joined = np.concatenate(parts)[: len(tokens)]
        return np.pad(joined, (0, len(tokens) - len(joined)), constant_values=self._marks.eod)

    def _apply_fim(self, document: NDArray[np.int64], random: np.random.RandomState) -> NDArray[np.int64]:
        if not random.binomial(1, self._rate):
            return document
        runs = self._runs(document.tolist())
        length = sum(len(run) if isinstance(run, str) else 1 for run in runs)
        first, second = sorted(random.randint(low=0, high=length + 1, size=2).tolist())
        suffix_first = random.binomial(1, self._spm_rate)
        # A sample may begin or end inside a character.
        if not runs or any(isinstance(run, str) and _UNREADABLE in run for run in runs):
            return document
        prefix, middle, suffix = (
            self._encode(_cut(runs, *part)) for part in ((0, first), (first, second), (second, length))
        )
        if self._runs([*prefix, *middle, *suffix]) != runs:
            return document  # of a tokenizer that does not give back every text
        marks = self._marks
        if suffix_first:
            order = [marks.prefix, marks.suffix, *suffix, marks.middle, *prefix, *middle]
        else:
            order = [marks.prefix, *prefix, marks.suffix, *suffix, marks.middle, *middle]
        return np.array(order, np.int64)

    def _runs(self, ids: Sequence[int]) -> list[str | int]:
        """The text of ids, in which each special token stays an id."""
        runs: list[str | int] = []
        for special, group in groupby(ids, self._tokenizer.textless_ids.__contains__):
            if special:
                runs += group
            elif text := self._tokenizer.decode([*group]):
                runs.append(text)
        return runs

    def _encode(self, runs: Sequence[str | int]) -> list[int]:
        ids: list[int] = []
        for run in runs:
            ids += self._tokenizer.encode(run) if isinstance(run, str) else [run]
        return ids


def _cut(runs: Sequence[str | int], start: int, stop: int) -> list[str | int]:
    """The part from character `start` to `stop`, where an id is one character."""
    part: list[str | int] = []
    at = 0
    for run in runs:
        size = len(run) if isinstance(run, str) else 1
        first, last = max(start - at, 0), min(stop - at, size)
        if first < last:
            part.append(run[first:last] if isinstance(run, str) else run)
        at += size
    return part
