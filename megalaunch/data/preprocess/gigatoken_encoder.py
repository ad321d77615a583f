"""Encodes with gigatoken, with bounded memory and exactly the ids of `tokenizers`.

gigatoken caches every word that it has encoded, about 9 bytes for each byte of text that does not repeat, without a
limit: past a limit it is loaded again, with the same ids. Its NFC is that of Unicode 17, that of `tokenizers` is
Unicode 9: texts with characters that differ between the two are encoded by `tokenizers`.

gigatoken has no `Digits` pre-tokenizer (SmolLM2 isolates digits first), and refuses a vocabulary without a token for
every byte (SmolLM2 lacks 21). It isolates added tokens before pre-tokenization: so it gets a copy of the tokenizer.json
with each digit as an added token, with a placeholder id above the vocabulary if it is not a single token, and
placeholder ids for the missing bytes. The placeholder of a digit is replaced by its ids; texts with a missing byte are
encoded by `tokenizers`.
"""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.tokenizer.tokenizer import Tokenizer, tokenizer_from_json

CACHE_BYTES = 192 << 20  # growth of the process at which gigatoken is reloaded to drop its cache
_CHECK_EVERY = 1 << 20  # characters between checks of the memory
_RELOAD_EVERY = 1 << 25  # characters between reloads, if the system does not report a process's memory
_NFC = '"NFC"'  # in a tokenizer.json with that normalizer; in others it may be a token, which is harmless
_DIGITS = '"Digits"'  # in a tokenizer.json with that pre-tokenizer; in others it may be a token, which is harmless
# Code points above are ideographs, private use and tags: no digits.
_EXAMINED = 0x20000
_CODE_POINTS = 0x110000
# Code points that NFC reorders or composes in Unicode 17 and not in Unicode 9 (gigatoken 0.10, tokenizers 0.23; a
# test looks for others), and blocks of scripts added since in which two characters may compose.
_NEWER = (
    *((0x897, 0x898), (0x89C, 0x89F), (0x8CA, 0x8CE), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C)),
    *((0xEBA, 0xEBA), (0x1715, 0x1715), (0x1ABF, 0x1AFF), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x105C0, 0x105FF)),
    *((0x10D24, 0x10D27), (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFF), (0x10F46, 0x10F50)),
    *((0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x11380, 0x113FF), (0x1145E, 0x1145E)),
    *((0x11839, 0x1183A), (0x11900, 0x1195F), (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47)),
    *((0x11A99, 0x11A99), (0x11D42, 0x11D45), (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x16100, 0x1613F)),
    *((0x16D40, 0x16D7F), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE)),
    *((0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF), (0x1E6E0, 0x1E6FF)),
)


class GigatokenEncoder:
    """Encodes one text per call with gigatoken, for the content of a tokenizer.json.

    Raises ImportError without the package; gigatoken's own exceptions for unsupported tokenizers are passed on.
    """

    def __init__(self, content: str, cache_bytes: int = CACHE_BYTES) -> None:
        self._content, self._cache_bytes = content, cache_bytes
        self._normalizes = _NFC in content
        self._digits = DigitTokens.build(content)
        self._encode = self._load()
        self._start_bytes = _private_bytes()
        self._characters = 0  # characters since the last check of the memory

    def __call__(self, text: str) -> NDArray[Any]:
        """Return the ids of a text, from `tokenizers` where gigatoken might differ."""
        if self._normalizes and not text.isascii() and has_newer_marks(text):
            return self._exact_ids(text)
        if self._digits is not None and may_hold_newer_digits(text):
            return self._exact_ids(text)
        ids = self._encode(text)
        self._characters += len(text)
        if self._characters >= _CHECK_EVERY:
            self._check_memory()
        if self._digits is None:
            return ids
        replaced = self._digits.replace(ids)
        return self._exact_ids(text) if replaced is None else replaced

    def _load(self) -> Callable[[str], NDArray[Any]]:
        import gigatoken

        content = self._content if self._digits is None else self._digits.content
        encode: Callable[[str], NDArray[Any]] = gigatoken.Tokenizer.from_json(content.encode()).encode
        return encode

    def _check_memory(self) -> None:
        """Reload gigatoken if the process has grown by more than `cache_bytes`."""
        now = _private_bytes()
        if now is None or self._start_bytes is None:
            if self._characters < _RELOAD_EVERY:
                return
        elif now - self._start_bytes <= self._cache_bytes:
            self._characters = 0
            return
        del self._encode  # free the old one first, so that two never coexist
        self._encode = self._load()
        self._start_bytes, self._characters = _private_bytes(), 0

    def _exact_ids(self, text: str) -> NDArray[Any]:
        return np.array(self._exact.encode_batch([text])[0], dtype=np.uint32)

    @cached_property
    def _exact(self) -> Tokenizer:
        return tokenizer_from_json(self._content)


def has_newer_marks(text: str) -> bool:
    """Return whether gigatoken's NFC may differ from that of `tokenizers` for a text."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return bool(_newer()[points].any())


@cache
def _newer() -> NDArray[np.bool_]:
    table = np.zeros(_CODE_POINTS, np.bool_)
    for first, last in _NEWER:
        table[first : last + 1] = True
    return table


def _private_bytes() -> int | None:
    """Return the private memory of this process in bytes; None if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return None
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


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
        rewritten = json.loads(content)
        steps = (rewritten.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
        isolates = steps[0].get("type") == "Digits" and steps[0].get("individual_digits")
        by_bytes = steps[-1].get("type") == "ByteLevel" and not any(step.get("add_prefix_space") for step in steps)
        model, added = rewritten["model"], rewritten["added_tokens"]
        if not isolates or not by_bytes or rewritten.get("normalizer") or any(map(_conflicts, added)):
            return None
        rewritten["pre_tokenizer"] = steps[1] if len(steps) == 2 else {"type": "Sequence", "pretokenizers": steps[1:]}
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
        return cls(json.dumps(rewritten), first, bytes_end, [ids[digit] for digit in several])

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


def _conflicts(token: dict[str, Any]) -> bool:
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
