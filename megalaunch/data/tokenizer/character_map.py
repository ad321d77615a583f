"""SentencePiece's normalization (nmt_nfkc and its kind) by the normalizers of `tokenizers`.

SentencePiece replaces the longest sequence that its map knows, from left to right. `tokenizers` looks up a letter with
all its marks as one, drops the marks where the map knows the letter alone, and composes nothing over 5 bytes. So they
are composed before, as far as they stand in the order in which the map has them, and parted for the lookup.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

_PARTING = "\ufff8"  # unassigned, a control by the rules of grapheme clusters: it composes with nothing
_LAST = 0x20000
_MARKS = range(0x300, 0x370)
_BEHIND = r"(?<=[\s\S])"
_JOINERS = r"\x{200c}\x{200d}\n"  # what belongs to the character before it, besides marks
# Voiced marks of half the width behind what is no syllable for them.
_VOICED = r"(?<=[^\x{ff73}\x{ff76}-\x{ff84}\x{ff8a}-\x{ff8e}\x{ff9c}\x{ff66}])(?=\x{ff9e})"
_VOICED += r"|(?<=[^\x{ff8a}-\x{ff8e}])(?=\x{ff9f})"
_JAMO = r"\x{1160}-\x{11ff}\x{d7b0}-\x{d7ff}"


def character_map_steps(character_map: bytes) -> list[Any]:
    """The normalizers for a precompiled map of characters."""
    from tokenizers import Regex, normalizers

    before, after = _is_boundary_before(), rf"{_BEHIND}(?=[\p{{M}}{_JOINERS}{_JAMO}])|{_VOICED}"
    return [
        normalizers.Replace(Regex(before), _PARTING),
        normalizers.NFC(),
        normalizers.Replace(Regex(after), _PARTING),
        normalizers.Precompiled(character_map),
        normalizers.NFC(),  # of a syllable and a voiced mark that had half the width
        normalizers.Replace(_PARTING, ""),
    ]


@cache
def _is_boundary_before() -> str:
    """A pattern of the places that nothing is composed or sorted across.

    Before marks that compose with no letter, and before one that sorting would bring before the mark it follows.
    """
    composing = _composing_marks()
    numbers = sorted({unicodedata.combining(mark) for mark in composing})
    classes = {
        number: _class(mark for mark in composing if unicodedata.combining(mark) == number) for number in numbers
    }
    unsorted = [
        rf"(?<=[{''.join(classes[other] for other in classes if other > number)}])(?=[{marks}])"
        for number, marks in classes.items()
        if number and max(classes) > number
    ]
    others = rf"{_BEHIND}(?=[[\p{{M}}{_JOINERS}]&&[^{_class(composing)}]])"
    return "|".join([others, *unsorted])


def _composing_marks() -> list[str]:
    """Second characters of all pairs that NFC makes one of."""
    found = set()
    for point in range(0xA0, _LAST):
        first, _, second = unicodedata.decomposition(chr(point)).partition(" ")
        pair = second and " " not in second and not first.startswith("<")
        if pair and unicodedata.is_normalized("NFC", chr(point)):
            found.add(chr(int(second, 16)))
    same = {mark for mark in map(chr, _MARKS) if unicodedata.normalize("NFC", mark) in found}  # written otherwise
    return sorted(found | same)


def _class(characters: Any) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in characters)
