"""Hashes of a file block by block, so that what a check finds altered can be named by its place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 26  # bytes
_READ_AT_ONCE = 1 << 20


class BlockHashes:
    """The sha256 of each block of what was added so far."""

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._open, self._held = hashlib.sha256(), 0

    def add(self, content: bytes | memoryview) -> None:
        """Append to the file that is hashed."""
        left = memoryview(content)
        while left:
            part = left[: BLOCK - self._held]
            self._open.update(part)
            self._held += len(part)
            left = left[len(part) :]
            if self._held == BLOCK:
                self._whole.append(self._open.hexdigest())
                self._open, self._held = hashlib.sha256(), 0

    def digests(self) -> list[str]:
        """One hex digest a block, that of the last, shorter one included."""
        return [*self._whole, self._open.hexdigest()] if self._held else list(self._whole)


def hash_file(path: Path, size: int | None = None) -> BlockHashes:
    """The hashes of a file, or of its first `size` bytes. Raises OSError."""
    hashes = BlockHashes()
    for part in _parts(path, size):
        hashes.add(part)
    return hashes


def describe(path: Path, hashes: BlockHashes | None = None) -> dict[str, Any]:
    """Size and block hashes of a file as a report holds them; `hashes` when they are known. Raises OSError."""
    known = hash_file(path) if hashes is None else hashes
    return {"bytes": path.stat().st_size, "block_bytes": BLOCK, "sha256": known.digests()}


def _parts(path: Path, size: int | None) -> Iterator[bytes]:
    left = path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left and (part := file.read(min(left, _READ_AT_ONCE))):
            left -= len(part)
            yield part
