"""Read a growing file of JSON lines, also when a resume truncates it by an atomic rewrite."""

from __future__ import annotations

import json
from pathlib import Path

from megalaunch.rundir.jsonl import Record


class JsonlTail:
    """Reads each complete line once; `at_end` skips the lines that exist at construction."""

    def __init__(self, path: Path, at_end: bool = False) -> None:
        self._path = path
        self._offset = 0
        self._inode: int | None = None
        if at_end:
            try:
                stat = path.stat()
                self._offset, self._inode = stat.st_size, stat.st_ino
            except OSError:
                pass

    def read_new(self) -> tuple[list[Record], bool]:
        """Return (new records, rewritten). When the file was replaced, these are all of its records."""
        try:
            with self._path.open("rb") as file:
                file.seek(0, 2)
                size = file.tell()
                inode = self._path.stat().st_ino
                rewritten = (self._inode is not None and inode != self._inode) or size < self._offset
                if rewritten:
                    self._offset = 0
                self._inode = inode
                file.seek(self._offset)
                chunk = file.read(size - self._offset)
        except OSError:
            return [], False
        complete = chunk.rfind(b"\n") + 1
        self._offset += complete
        return _parse(chunk[:complete]), rewritten


def _parse(chunk: bytes) -> list[Record]:
    records = []
    for line in chunk.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
