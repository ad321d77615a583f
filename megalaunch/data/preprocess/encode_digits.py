"""Adapts tokenizers that isolate digits first, such as SmolLM2's, for gigatoken.

gigatoken has no `Digits` pre-tokenizer, and refuses a vocabulary without a token for every byte (SmolLM2 lacks 21). It
isolates added tokens before pre-tokenization: so a copy of the tokenizer.json has each digit as an added token, with a
placeholder id above the vocabulary if it is not a single token, and placeholder ids for the missing bytes. The
placeholder of a digit is replaced by its ids; texts with a missing byte are encoded by `tokenizers`.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIGITS = '"Digits"'  # in a tokenizer.json with that pre-tokenizer; in others it may be a token, which is harmless
# Code points above are ideographs, private use and tags: no digits.
_EXAMINED = 0x20000
_CODE_POINTS = 0x110000


class DigitTokens:
    """A tokenizer.json for gigatoken (`content`); `replace` maps its ids to those of the original."""

    def __init__(self, content: str, first: int, bytes_end: int, ids: list[list[int]]) -> None:
        """Placeholder ids from `first` to `bytes_end` are missing bytes, those above are digits, which have `ids`."""
        self.content = content
        self._first, self._bytes_end = first, bytes_end
        self._sizes = np.ones(bytes_end + len(ids), np.int64)
        self._sizes[bytes_end:] = [*map(len, ids)]
        self._ids = np.concatenate([np.arange(bytes_end), *ids]).astype(np.uint32)
        self._starts = np.cumsum(self._sizes) - self._sizes

    @classmethod
    def build(cls, content: str) -> DigitTokens | None:
        """Build from a tokenizer.json; None if it does not start with isolating digits, or another step interferes."""
        if _DIGITS not in content:
            return None
        whole = json.loads(content)
        steps = (whole.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
        isolates = steps[0].get("type") == "Digits" and steps[0].get("individual_digits")
        by_bytes = steps[-1].get("type") == "ByteLevel" and not any(step.get("add_prefix_space") for step in steps)
        model, added = whole["model"], whole["added_tokens"]
        if not isolates or not by_bytes or whole.get("normalizer") or any(map(_interferes, added)):
            return None
        whole["pre_tokenizer"] = steps[1] if len(steps) == 2 else {"type": "Sequence", "pretokenizers": steps[1:]}
        vocabulary = model["vocab"]
        first = 1 + max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
        missing = sorted(_byte_characters() - vocabulary.keys())
        digits = [digit for digit in _digits() if digit not in {token["content"] for token in added}]
        encodings = _library(content).encode_batch(digits, add_special_tokens=False)
        ids = {digit: encoding.ids for digit, encoding in zip(digits, encodings, strict=True)}
        several = [digit for digit in digits if ids[digit] != [vocabulary.get(digit)]]
        vocabulary |= {character: first + at for at, character in enumerate(missing)}
        bytes_end = first + len(missing)
        placeholders = {digit: bytes_end + at for at, digit in enumerate(several)}
        added += [_added_token(digit, placeholders.get(digit, ids[digit][0])) for digit in digits if ids[digit]]
        added.sort(key=lambda token: token["id"])
        return cls(json.dumps(whole), first, bytes_end, [ids[digit] for digit in several])

    def replace(self, ids: NDArray[Any]) -> NDArray[Any] | None:
        """Return the ids of the original tokenizer; None for text with a byte that has no token."""
        placeholders = ids[ids >= self._first]
        if not placeholders.size:
            return ids
        if placeholders.min() < self._bytes_end:
            return None
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes)
        found: NDArray[Any] = self._ids[np.arange(ends[-1]) + np.repeat(self._starts[ids] - (ends - sizes), sizes)]
        return found


def may_hold_newer_digits(text: str) -> bool:
    """Return whether a character is newer than Python's Unicode; it may be a digit in that of `tokenizers`."""
    if text.isascii():
        return False
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return bool(_unassigned()[points].any())


def _interferes(token: dict[str, Any]) -> bool:
    """Return whether an added token is matched after the digits, or in a different way."""
    return token["single_word"] or (token["normalized"] and any(map(str.isnumeric, token["content"])))


def _added_token(content: str, number: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _library(content: str) -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_str(content)


def _byte_characters() -> set[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())


@cache
def _categories() -> list[str]:
    return [unicodedata.category(chr(point)) for point in range(_EXAMINED)]


@cache
def _digits() -> list[str]:
    """Return the characters that `tokenizers` isolates, of the numbers in Python's Unicode, which may be newer."""
    from tokenizers.pre_tokenizers import Digits

    numbers = [chr(point) for point, category in enumerate(_categories()) if category[0] == "N"]
    pieces = {piece for piece, _ in Digits(individual_digits=True).pre_tokenize_str("".join(f"a{n}a" for n in numbers))}
    return [number for number in numbers if number in pieces]


@cache
def _unassigned() -> NDArray[np.bool_]:
    table = np.zeros(_CODE_POINTS, np.bool_)
    table[:_EXAMINED] = [category == "Cn" for category in _categories()]
    return table
