"""Computes the sha256 of each input asynchronously with the encoding, while the file is still in the page cache."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.source_files import open_source

_BLOCK = 1 << 20  # bytes, which stay in the CPU cache between reading and hashing
_AHEAD = 1 << 28  # bytes that hashing may be ahead of the encoding


class InputHashes:
    """Hashes the inputs in a thread, from `start` or else from `finish`, which waits for them."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._hashes: list[str] = []
        self._error: DataError | None = None
        self._hashed = self._reached = 0
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._hash_all, daemon=True)

    def start(self) -> None:
        """Start the thread. From then on this process must not fork."""
        self._thread.start()

    def reached(self, position: int) -> None:
        """Report the number of bytes of all inputs that are encoded, which paces the hashing."""
        with self._moved:
            self._reached = position
            self._moved.notify()

    def finish(self) -> list[str]:
        """Return the hex digest of each input, empty for standard input. DataError if an input could not be read."""
        self.reached(sum(entry.size for entry in self._inputs))
        if self._thread.ident is None:
            self.start()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._hashes

    def _hash_all(self) -> None:
        try:
            for entry in self._inputs:
                self._hashes.append("" if entry.is_stdin else self._sha256(entry))
        except DataError as error:
            self._error = error

    def _sha256(self, entry: Input) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
        with open_source(entry.path) as file:
            while size := file.readinto(block):
                digest.update(block[:size])
                self._hashed += size
                with self._moved:
                    self._moved.wait_for(lambda: self._hashed <= self._reached + _AHEAD)
        return digest.hexdigest()
