"""SentencePiece's normalization (nmt_nfkc and similar character maps) expressed as normalizers of `tokenizers`.

SentencePiece replaces the longest sequence of its character map, from left to right. The `Precompiled` normalizer of
`tokenizers` uses the same map, but replaces single characters only in most cases. So the text is first cut where one
sequence of the map ends and a combining mark follows; each character is replaced by itself; what the map composes is
then composed by NFC, which does not reach across a cut. Sequences for which this gives another text than the map does
are replaced before, by stand-ins.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

# Unassigned characters that are controls for the segmentation into graphemes: NFC composes nothing with them.
_CUT, _SINGLE, _IOTA = "\ufff8", "\ufff7", "\ufff6"
_STAND_INS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # noncharacters, which are never assigned
_YPOGEGRAMMENI = "\u0345"  # a mark within a sequence; alone, case folding makes it a letter
# Characters other than marks that `Precompiled` looks up together with the preceding one.
_JOINERS = r"\x{200c}\x{200d}\n\x{1160}-\x{11ff}\x{d7b0}-\x{d7ff}"
_LEAF, _LABEL = 1 << 8, 1 << 31 | 0xFF
_BYTES = [bytes([value]) for value in range(256)]


@lru_cache(maxsize=4)
def character_map_steps(character_map: bytes) -> list[Any]:
    """Return the normalizers for a precompiled character map.

    Raises:
        ValueError: the map is damaged, or has too many sequences that no normalizer gives.
    """
    from tokenizers import Regex, normalizers

    replacements = read_replacements(character_map)
    sequences = {key: value for key, value in replacements.items() if len(key) > 1}
    pattern = _Pattern(replacements, sequences)
    others = _other_values(replacements, sequences)
    if len(others) > len(_STAND_INS):
        raise ValueError(f"{len(others)} replacements of its character map cannot be kept exactly")
    stand_ins = dict(zip(others, _STAND_INS, strict=False))
    exact = [normalizers.Replace(Regex(pattern.one_of(keys)), stand_ins[value]) for value, keys in others.items()]
    joined = rf"(?<=[\s\S])(?=[\p{{M}}{_JOINERS}{_characters(pattern.second)}])"
    return [
        normalizers.Replace(Regex(pattern.end_of_sequence), _CUT),
        *exact,
        normalizers.Replace(Regex(rf"(?<=[^{_CUT}]){_YPOGEGRAMMENI}"), _IOTA),
        normalizers.Replace(Regex(joined), _SINGLE),
        normalizers.Precompiled(character_map),
        normalizers.Replace(_SINGLE, ""),
        normalizers.Replace(_IOTA, _YPOGEGRAMMENI),
        normalizers.NFC(),
        *(normalizers.Replace(stand_ins[value], value) for value in others),
        normalizers.Replace(_CUT, ""),
    ]


class _Pattern:
    """Regular expressions for the sequences of a character map.

    Attributes:
        second: all characters that occur after the first one of a sequence.
        end_of_sequence: matches the empty text between the end of a sequence, or of a single character, and a mark.
            The search continues at the preceding match (`\\G`) or at a character that cannot continue a sequence, so
            sequences are matched from left to right, the longest first, as SentencePiece matches them.
    """

    def __init__(self, replacements: Mapping[str, str], sequences: Iterable[str]) -> None:
        tails: dict[str, set[str]] = defaultdict(set)
        for key in sequences:
            tails[key[0]].add(key[1:])
        self.second = {character for found in tails.values() for tail in found for character in tail}
        moving = {key for key, value in replacements.items() if len(key) == 1 and self._moves(value)}
        self._continuing = rf"\p{{M}}{_characters(self.second | moving)}"
        heads: dict[frozenset[str], list[str]] = defaultdict(list)
        for head, found in tails.items():
            heads[frozenset(found)].append(head)
        longest = "|".join(f"[{_characters(some)}]{_longest_of(found)}" for found, some in heads.items())
        sequence = rf"(?>(?=[\s\S][{_characters(self.second)}])(?:{longest})|[\s\S])"
        start = rf"(?:\G(?=[{self._continuing}])|(?=[^{self._continuing}]))"
        self.end_of_sequence = rf"{start}{sequence}\K(?=[{self._continuing}])"

    def _moves(self, value: str) -> bool:
        """Return whether NFC may compose or reorder a replacement with the text before it."""
        return bool(value) and (value[0] in self.second or unicodedata.combining(value[0]) > 0)

    def one_of(self, sequences: Iterable[str]) -> str:
        """Return a pattern of some sequences, in a text with cuts."""
        return rf"(?:{'|'.join(map(_escape, sorted(sequences)))})(?=[^{self._continuing}]|\z)"


def _other_values(replacements: Mapping[str, str], sequences: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the sequences that differ from NFC of their characters' replacements, by their replacement."""
    single = {key: value for key, value in replacements.items() if len(key) == 1} | {_YPOGEGRAMMENI: _YPOGEGRAMMENI}
    composed = _nfc(["".join([single.get(character, character) for character in key]) for key in sequences])
    found: dict[str, list[str]] = defaultdict(list)
    for (key, value), other in zip(sequences.items(), composed, strict=True):
        if other != value:
            found[value].append(key)
    return dict(sorted(found.items(), key=lambda item: -max(map(len, item[1]))))  # a longer one may contain another


def _nfc(texts: Iterable[str]) -> list[str]:
    """Return texts as the NFC of `tokenizers` composes them, which may follow another Unicode than Python does."""
    from tokenizers import normalizers

    return normalizers.NFC().normalize_str(_CUT.join(texts)).split(_CUT)


def _longest_of(tails: Iterable[str]) -> str:
    """Return a pattern that matches the longest of some texts."""
    following: dict[str, set[str]] = defaultdict(set)
    ends = False
    for tail in tails:
        if tail:
            following[tail[0]].add(tail[1:])
        else:
            ends = True
    if not following:
        return ""
    alike: dict[str, list[str]] = defaultdict(list)
    for character, rest in following.items():
        alike[_longest_of(rest)].append(character)
    branches = "|".join(f"[{_characters(some)}]{rest}" for rest, some in alike.items())
    return f"(?:{branches}){'?' if ends else ''}"


def _characters(some: Iterable[str]) -> str:
    """Return characters as the content of a class, consecutive ones as ranges."""
    ranges: list[list[int]] = []
    for point in sorted(map(ord, some)):
        if ranges and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        else:
            ranges.append([point, point])
    return "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in ranges)


def _escape(text: str) -> str:
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def read_replacements(character_map: bytes) -> dict[str, str]:
    """Read all replacements of a precompiled map: a double-array trie (Darts-clone), then the replacements.

    Source: SentencePiece, `normalizer.cc` (DecodePrecompiledCharsMap).
    """
    try:
        (size,) = struct.unpack_from("<I", character_map)
        values = character_map[4 + size :]
        starts = [0, *(match.end() for match in re.finditer(b"\0", values))]
        texts = dict(zip(starts, values.split(b"\0"), strict=True))
        return {key.decode(): texts[offset].decode() for key, offset in _trie(character_map[4 : 4 + size])}
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"its character map is damaged: {error}") from None


def _trie(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield every key of a Darts-clone trie and its value.

    A child is at its parent's base XOR its label, so a unit and its label tell its parent's base.
    """
    import numpy as np

    units = np.frombuffer(content, dtype="<u4")
    bases = np.arange(len(units)) ^ ((units >> 10) << ((units & (1 << 9)) >> 6))
    labels = units & _LABEL
    children = np.nonzero((labels > 0) & (labels < 256))[0]
    children = children[np.argsort(children ^ labels[children], kind="stable")]
    parents = children ^ labels[children]
    keys, nodes = [b""], bases[:1]
    while keys:
        first, end = np.searchsorted(parents, nodes, "left"), np.searchsorted(parents, nodes, "right")
        counts = end - first
        start_of_run = np.repeat(np.cumsum(counts) - counts, counts)
        found = children[np.arange(counts.sum()) - start_of_run + np.repeat(first, counts)]
        prefixes = np.repeat(np.arange(len(keys)), counts).tolist()
        keys = [keys[prefix] + _BYTES[label] for prefix, label in zip(prefixes, labels[found].tolist(), strict=True)]
        nodes = bases[found]
        leaves = np.nonzero(units[found] & _LEAF)[0]
        values = units[nodes[leaves]] & 0x7FFFFFFF
        yield from zip((keys[leaf] for leaf in leaves.tolist()), values.tolist(), strict=True)
