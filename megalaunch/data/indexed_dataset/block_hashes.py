"""Block hashes and piece checksums of a file, so that a check can locate altered bytes."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 1 << 26  # bytes hashed by one sha256
PIECE = 1 << 20  # bytes of one Adler-32; divides BLOCK
_READ_AT_ONCE = 1 << 20
_ADLER_PRIME = 65521


class BlockHashes:
    """The sha256 of each block and the Adler-32 of each piece of the bytes added so far."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._open, self._held = hashlib.sha256(), 0
        self._pieces: list[int] = []

    def add(self, content: bytes | memoryview) -> None:
        """Append bytes to the hashed content."""
        left = memoryview(content)
        while left:
            part = left[: PIECE - self._held % PIECE]
            if self._held % PIECE == 0:
                self._pieces.append(1)
            self._open.update(part)
            self._pieces[-1] = zlib.adler32(part, self._pieces[-1])
            self._held += len(part)
            left = left[len(part) :]
            if self._held == BLOCK:
                self._whole.append(self._open.hexdigest())
                self._open, self._held = hashlib.sha256(), 0

    def digests(self) -> list[str]:
        """Return the hex digest of each block, including the last, shorter one."""
        return [*self._whole, self._open.hexdigest()] if self._held else list(self._whole)

    def pieces(self) -> str:
        """Return the checksums of all pieces, eight hex digits each."""
        return "".join(f"{piece:08x}" for piece in self._pieces)


def hash_file(path: Path, size: int | None = None) -> BlockHashes:
    """Hash a file, or its first `size` bytes. Raises OSError."""
    hashes = BlockHashes()
    for part in _parts(path, size):
        hashes.add(part)
    return hashes


def describe(path: Path, hashes: BlockHashes | None = None) -> dict[str, Any]:
    """Return size and block hashes of a file for a report; `hashes` if they are already computed. Raises OSError."""
    known = hash_file(path) if hashes is None else hashes
    sums = {"piece_bytes": PIECE, "adler32": known.pieces()}
    return {"bytes": path.stat().st_size, "block_bytes": BLOCK, "sha256": known.digests(), **sums}


@dataclass(frozen=True)
class Altered:
    """Bytes `first` to `last` (inclusive) of a file differ from the description.

    Attributes:
        first: first byte that may differ.
        last: last byte that may differ.
        was: original value, if a single byte was identified.
    """

    first: int
    last: int
    was: int | None = None


def find_altered(path: Path, described: dict[str, Any]) -> Altered | None:
    """Return the first place where a file differs from its description by `describe`; None if it is the same.

    A single altered byte is located exactly: the Adler-32 of its piece gives the difference of its value and the
    candidate positions, and sha256 selects one of them. Several altered bytes are located to their pieces.

    Raises:
        OSError: the file cannot be read.
    """
    known, size = hash_file(path), path.stat().st_size
    if size != described["bytes"]:
        return Altered(min(size, described["bytes"]), max(size, described["bytes"]) - 1)
    hashes = enumerate(zip(known.digests(), described["sha256"], strict=True))
    differing = (number for number, (now, then) in hashes if now != then)
    block = next(differing, None)
    if block is None:
        return None
    pieces, before = known.pieces(), described.get("adler32")
    if isinstance(before, str) and len(before) == len(pieces) and described.get("piece_bytes") == PIECE:
        of_block = range(block * (BLOCK // PIECE), min((block + 1) * (BLOCK // PIECE), len(pieces) // 8))
        sums = {piece: (pieces[8 * piece : 8 * piece + 8], before[8 * piece : 8 * piece + 8]) for piece in of_block}
        wrong = [piece for piece, (now, then) in sums.items() if now != then]
        if len(wrong) == 1:
            now, then = (int(value, 16) for value in sums[wrong[0]])
            found = _one_byte(path, block, described["sha256"][block], wrong[0] * PIECE, now, then)
            return found or Altered(wrong[0] * PIECE, min((wrong[0] + 1) * PIECE, size) - 1)
        if wrong:
            return Altered(wrong[0] * PIECE, min((wrong[-1] + 1) * PIECE, size) - 1)
    return Altered(block * BLOCK, min((block + 1) * BLOCK, size) - 1)


def _one_byte(path: Path, block: int, digest: str, first: int, now: int, then: int) -> Altered | None:
    """Return the single byte in the piece at `first` that explains both checksums, if there is one.

    With n bytes b_i, Adler-32 consists of 1 + sum(b_i) and n + sum((n - i) b_i), both modulo 65521.
    """
    with path.open("rb") as file:
        file.seek(block * BLOCK)
        content = bytearray(file.read(BLOCK))
    start = first - block * BLOCK
    length = min(PIECE, len(content) - start)
    change = (now % (1 << 16) - then % (1 << 16)) % _ADLER_PRIME
    if change == 0:
        return None
    weight = ((now >> 16) - (then >> 16)) * pow(change, -1, _ADLER_PRIME) % _ADLER_PRIME
    signed = change if change < 256 else change - _ADLER_PRIME
    for place in range(start + (length - weight) % _ADLER_PRIME, start + length, _ADLER_PRIME):
        stands = content[place]
        if 0 <= stands - signed < 256:
            content[place] = stands - signed
            if hashlib.sha256(content).hexdigest() == digest:
                return Altered(block * BLOCK + place, block * BLOCK + place, stands - signed)
            content[place] = stands
    return None


def _parts(path: Path, size: int | None) -> Iterator[bytes]:
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (part := file.read(min(left, _READ_AT_ONCE))):
            left -= len(part)
            yield part
