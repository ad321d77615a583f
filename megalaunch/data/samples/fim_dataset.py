"""Fill-in-the-middle (FIM, Bavarian et al. 2022): some documents are reordered so that their middle comes last.

The random choices and split points (in characters) are those of Megatron's FIM dataset; each sample has its own
generator, so that it does not depend on what was read before. Differences from Megatron: special tokens are
preserved (Megatron's decoding drops them; here each counts as one character), and no part gains a leading space that
the text does not have.
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

# A tokenizer.json does not name its FIM tokens; these are the names that published models use.
_KNOWN_MARKS = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>"),
    ("<PRE>", "<MID>", "<SUF>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581end\uff5c>", "<\uff5cfim\u2581hole\uff5c>"),
)
_STREAM = 0xF13  # separates this random stream from others of the same seed
_UNREADABLE = "\ufffd"  # an incomplete character decodes to this


@dataclass(frozen=True)
class FIMTokens:
    """Ids of the tokens before prefix, middle and suffix of a document, and of the end-of-document token."""

    prefix: int
    middle: int
    suffix: int
    eod: int


def find_fim_tokens(tokenizer: Tokenizer, names: Sequence[str], eod: int, path: Path) -> FIMTokens:
    """Return the FIM tokens of a tokenizer.

    Args:
        tokenizer: the tokenizer to search.
        names: names for prefix, middle and suffix; empty: the first known triple that the tokenizer has.
        eod: id of the end-of-document token.
        path: file of the tokenizer, for the error.

    Raises:
        DataError: the tokenizer does not have them as single tokens.
    """
    for candidate in (tuple(names),) if names else _KNOWN_MARKS:
        ids = [_token(tokenizer, name) for name in candidate]
        if len(ids) == 3 and all(len(tokens) == 1 for tokens in ids):
            (prefix,), (middle,), (suffix,) = ids
            return FIMTokens(prefix, middle, suffix, eod)
    looked = ", ".join(names) if names else " or ".join(marks[0] for marks in _KNOWN_MARKS)
    raise DataError(
        f"it has no fill-in-the-middle tokens (tried {looked})",
        file=path,
        fix="Set data.fim_tokens=[PREFIX,MIDDLE,SUFFIX] to three tokens of it, or data.fim_rate=0.",
    )


def _token(tokenizer: Tokenizer, name: str) -> list[int]:
    """Return the ids of a FIM token: encoded from text, or a vocabulary entry that no text encodes to."""
    ids, entry = tokenizer.encode(name), tokenizer.token_id(name)
    return [entry] if len(ids) != 1 and entry is not None else ids


class FIMDataset:
    """The samples of `source`, with FIM applied to documents (or to the part of one in the sample).

    With probability `rate` a document becomes prefix, suffix, middle (PSM), or with probability `spm_rate` of those
    suffix, prefix, middle (SPM). The result is truncated or padded with `marks.eod` to the sample's length.
    """

    def __init__(
        self, source: TokenDataset, tokenizer: Tokenizer, marks: FIMTokens, rate: float, spm_rate: float, seed: int
    ) -> None:
        self._source, self._tokenizer, self._marks = source, without_prefix_space(tokenizer), marks
        self._rate, self._spm_rate, self._seed = rate, spm_rate, seed

    def __len__(self) -> int:
        return len(self._source)

    def describe(self, index: int) -> str:
        """Return one line for reports: the origin of sample `index`."""
        return self._source.describe(index)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of sample `index`, int64 [S + 1]."""
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
        """Reorder one document, or return it unchanged if it is not drawn or does not survive re-encoding."""
        if not random.binomial(1, self._rate):
            return document
        runs = self._runs(document.tolist())
        length = sum(len(run) if isinstance(run, str) else 1 for run in runs)
        first, second = sorted(random.randint(low=0, high=length + 1, size=2).tolist())
        suffix_first = random.binomial(1, self._spm_rate)
        # A sample may begin or end within a multi-byte character.
        if not runs or any(isinstance(run, str) and _UNREADABLE in run for run in runs):
            return document
        prefix, middle, suffix = (
            self._encode(_cut(runs, *part)) for part in ((0, first), (first, second), (second, length))
        )
        if self._runs([*prefix, *middle, *suffix]) != runs:
            return document  # this tokenizer's decoding does not restore every text
        marks = self._marks
        # PSM is <prefix> P <suffix> S <middle> M. SPM is <prefix> <suffix> S <middle> P M, as in Megatron.
        if suffix_first:
            order = [marks.prefix, marks.suffix, *suffix, marks.middle, *prefix, *middle]
        else:
            order = [marks.prefix, *prefix, marks.suffix, *suffix, marks.middle, *middle]
        return np.array(order, np.int64)

    def _runs(self, ids: Sequence[int]) -> list[str | int]:
        """Decode ids to text, with each special token left as an id."""
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
    """Return characters `start` to `stop`, where an id counts as one character."""
    part: list[str | int] = []
    at = 0
    for run in runs:
        size = len(run) if isinstance(run, str) else 1
        first, last = max(start - at, 0), min(stop - at, size)
        if first < last:
            part.append(run[first:last] if isinstance(run, str) else run)
        at += size
    return part
