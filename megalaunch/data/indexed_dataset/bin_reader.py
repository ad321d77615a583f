"""Reads tokens of a `.bin` by position into new arrays, so that a run's memory does not grow with the file.

A memory map would count every page it ever touched, and a file truncated during the run would kill it by a signal.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.dataset import REMAKE

_RESTORE = "Mend the disk or copy the file again; the run continues from its last checkpoint."


class TokenReader:
    """An open `.bin` (Megatron's `_FileBinReader`). Thread-safe: `pread` has no shared file position."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.dtype = path, dtype
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise cannot("read it", path, error) from error

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens starting at token `first`; DataError if the file cannot be read or is too short."""
        tokens = np.empty(count, self.dtype)
        rest, offset = tokens.view(np.uint8).data, first * self.dtype.itemsize
        while rest:
            try:
                done = os.preadv(self._file.fileno(), [rest], offset)
            except OSError as error:
                raise cannot("read it", self.path, error, _RESTORE) from error
            if done == 0:
                raise DataError(f"it ends before token {first + count:,}", file=self.path, fix=REMAKE)
            rest, offset = rest[done:], offset + done
        return tokens
