"""SentencePiece's normalization (nmt_nfkc and similar maps) expressed as normalizers of `tokenizers`.

SentencePiece replaces the longest sequence in its character map, from left to right. The `Precompiled` normalizer of
`tokenizers` looks up a letter together with its combining marks, drops the marks if the map has only the letter, and
composes no sequence over 5 bytes. So letters and marks are composed before the lookup, where they are in the order of
the map, and the remaining marks are separated from their letters.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

_PARTING = "\ufff8"  # separator: unassigned, a control in the grapheme cluster rules, composes with nothing
_LAST = 0x20000
_MARKS = range(0x300, 0x370)
_BEHIND = r"(?<=[\s\S])"
_JOINERS = r"\x{200c}\x{200d}\n"  # characters other than marks that extend the preceding character
# Half-width voiced sound marks after a character that they do not combine with.
_VOICED = r"(?<=[^\x{ff73}\x{ff76}-\x{ff84}\x{ff8a}-\x{ff8e}\x{ff9c}\x{ff66}])(?=\x{ff9e})"
_VOICED += r"|(?<=[^\x{ff8a}-\x{ff8e}])(?=\x{ff9f})"
_JAMO = r"\x{1160}-\x{11ff}\x{d7b0}-\x{d7ff}"


def character_map_steps(character_map: bytes) -> list[Any]:
    """Return the normalizers for a precompiled character map."""
    from tokenizers import Regex, normalizers

    before, after = _is_boundary_before(), rf"{_BEHIND}(?=[\p{{M}}{_JOINERS}{_JAMO}])|{_VOICED}"
    return [
        normalizers.Replace(Regex(before), _PARTING),
        normalizers.NFC(),
        normalizers.Replace(Regex(after), _PARTING),
        normalizers.Precompiled(character_map),
        normalizers.NFC(),  # composes a syllable with a voiced mark that was half-width
        normalizers.Replace(_PARTING, ""),
    ]


@cache
def _is_boundary_before() -> str:
    """Return a pattern of the positions across which NFC composes and reorders nothing.

    These are before marks that compose with no letter, and before a mark that reordering would move before its
    predecessor.
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
    """Return the second characters of all pairs that NFC composes."""
    found = set()
    for point in range(0xA0, _LAST):
        first, _, second = unicodedata.decomposition(chr(point)).partition(" ")
        pair = second and " " not in second and not first.startswith("<")
        if pair and unicodedata.is_normalized("NFC", chr(point)):
            found.add(chr(int(second, 16)))
    same = {mark for mark in map(chr, _MARKS) if unicodedata.normalize("NFC", mark) in found}  # equivalent code points
    return sorted(found | same)


def _class(characters: Any) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in characters)
