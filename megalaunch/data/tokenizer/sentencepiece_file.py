"""Reads a SentencePiece model file, a protocol buffer, with the standard library alone.

Field numbers are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
_LONGEST_VARINT = 10  # bytes


class PieceKind(IntEnum):
    """Type of a piece (`SentencePiece.Type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True)
class SentencePieceModel:
    """The pieces and the normalization settings of a model.

    Attributes:
        pieces: the vocabulary, by id.
        kind: unigram, BPE, word or char.
        byte_fallback: unknown characters are encoded as bytes.
        unknown: id of the unknown piece.
        end: end-of-sentence piece; None if it is not in the vocabulary.
        character_map: precompiled normalization map.
        dummy_prefix: a space is prepended to each text.
        squeezes_spaces: repeated, leading and trailing spaces are removed.
        escapes_spaces: spaces are replaced by U+2581.
        suffix_spaces: spaces are attached to the end of a word instead of the start.
    """

    pieces: tuple[Piece, ...]
    kind: str
    byte_fallback: bool
    unknown: int
    end: str | None
    character_map: bytes
    dummy_prefix: bool
    squeezes_spaces: bool
    escapes_spaces: bool
    suffix_spaces: bool


def read_sentencepiece(content: bytes) -> SentencePieceModel | None:
    """Parse a model; return None if the content is not one."""
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(dict(_fields(value))))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
    except (ValueError, struct.error, UnicodeDecodeError):
        return None
    unknown = next((number for number, piece in enumerate(pieces) if piece.kind is PieceKind.UNKNOWN), None)
    if unknown is None or not trainer:
        return None
    end_name = trainer.get(47, b"</s>")
    end = end_name.decode("utf-8", "replace") if isinstance(end_name, bytes) else None
    character_map = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=tuple(pieces),
        kind=_KINDS.get(int(trainer.get(3, 1)), "unknown"),
        byte_fallback=bool(trainer.get(35, 0)),
        unknown=unknown,
        end=end if any(piece.text == end for piece in pieces) else None,
        character_map=character_map if isinstance(character_map, bytes) else b"",
        dummy_prefix=bool(normalizer.get(3, 1)),
        squeezes_spaces=bool(normalizer.get(4, 1)),
        escapes_spaces=bool(normalizer.get(5, 1)),
        suffix_spaces=bool(trainer.get(24, 0)),
    )


def _piece(fields: dict[int, int | bytes]) -> Piece:
    text, score = fields.get(1, b""), fields.get(2, b"\0\0\0\0")
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("no piece")
    return Piece(text.decode("utf-8"), struct.unpack("<f", score)[0], PieceKind(int(fields.get(3, 1))))


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field: int for varints, else bytes. ValueError if it is not a protocol buffer."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind, size = key & 7, 0
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("no protocol buffer")
        if at + size > len(content):
            raise ValueError("cut")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at + place >= len(content):
            raise ValueError("cut")
        byte = content[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if not byte & 0x80:
            return value, at + place + 1
    raise ValueError("no varint")
