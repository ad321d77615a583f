"""Append-only files of JSON lines (metrics.jsonl, events.jsonl)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megalaunch import fs

Record = dict[str, Any]


def append_line(path: Path, record: Record) -> None:
    """Append one record in a single write, so that lines of several processes do not mix."""
    line = (json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n").encode()
    fs.append_line(path, line)


def read_lines(path: Path) -> Iterator[Record]:
    """Yield every complete record; an incomplete last line (of a killed writer) is skipped."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _parse_lines(file)


def read_last_lines(path: Path, limit: int) -> Iterator[Record]:
    """Yield the complete records within the last `limit` bytes of a file, in the order of the file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        if size > limit:
            file.readline()  # the rest of a line whose start is before the limit
        yield from _parse_lines(file)


def _parse_lines(lines: Iterable[bytes]) -> Iterator[Record]:
    """Yield the records of complete lines; an incomplete last line (of a killed writer) is skipped."""
    for line in lines:
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def keep_lines(path: Path, wanted: Callable[[Record], bool]) -> int:
    """Keep the records for which `wanted` is true, by an atomic rewrite; return the number of dropped lines."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        total = sum(1 for _ in file)
    kept = [record for record in read_lines(path) if wanted(record)]
    if len(kept) == total:
        return 0
    with fs.atomic_file(path) as file:
        for record in kept:
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return total - len(kept)
