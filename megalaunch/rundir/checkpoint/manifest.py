"""`manifest.json`: size and SHA-256 of every file of a checkpoint, written last.

A flipped byte loads silently in torch, safetensors and DCP alike; here it is detected, with the file's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.rundir.checkpoint.contents import POSITION
from megalaunch.rundir.paths import checkpoint_step

MANIFEST = "manifest.json"
POSITION_FILE = f"{POSITION}.json"
FORMAT, VERSION = "megalaunch checkpoint", 1
_MAX_BYTES = 100_000_000
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """One written file: name inside the checkpoint, size in bytes, SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def manifest_text(records: Iterable[FileRecord]) -> str:
    """Return the text of a manifest. It includes its own digest, so that any change to it is detected."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "files": {
            record.name: {"size": record.size, "sha256": record.sha256}
            for record in sorted(records, key=lambda record: record.name)
        },
    }
    return _signed(body)


def _signed(body: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({**body, "digest": digest}, indent=1) + "\n"


def verify_checkpoint(
    directory: Path,
    part: tuple[int, int] = (0, 1),
    hashes: bool = True,
    read: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Return all problems of a checkpoint, each with its file's name; an empty list means that it is valid.

    Args:
        directory: the checkpoint.
        part: (k, n): verify only the k-th of n parts of the files, so that n ranks share the work.
        hashes: False compares only the sizes.
        read: progress callback: (bytes read, total bytes) of this part.
    """
    try:
        records = read_manifest(directory)
    except ValueError as error:
        return [str(error)]
    problems, done = [], 0
    records = records[part[0] :: part[1]]
    total = sum(record.size for record in records)
    for record in records:
        before = done
        problem = _file_problem(directory / record.name, record, hashes, lambda count: read(before + count, total))  # noqa: B023
        done += record.size
        if problem:
            problems.append(f"{record.name}: {problem}")
    if not problems and any(record.name == POSITION_FILE for record in records):
        problems += _position_problems(directory)
    return problems


def _position_problems(directory: Path) -> list[str]:
    """Check the saved step against the directory's name: a copy under another step's name is invalid."""
    named = checkpoint_step(directory)
    if named is None:  # a name that the user chose
        return []
    try:
        position = json.loads((directory / POSITION_FILE).read_text(encoding="utf-8"))
        step = position["step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return [f"{POSITION_FILE}: has no step"]
    return [] if step == named else [f"{POSITION_FILE}: is for step {step!r}, but the directory is named step {named}"]


def read_manifest(directory: Path) -> list[FileRecord]:
    """Return the records of a manifest, largest file first. Raises ValueError that says what is wrong with it."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{MANIFEST}: is missing, so the checkpoint is incomplete")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{MANIFEST}: is damaged (too big)")
    try:
        text = path.read_text(encoding="utf-8")
        body = json.loads(text)
        version = (body.get("format"), body.get("version"))
        digest_fits = text == _signed({key: value for key, value in body.items() if key != "digest"})
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{MANIFEST}: is damaged ({type(error).__name__})") from error
    if version != (FORMAT, VERSION):
        raise ValueError(f"{MANIFEST}: has the format {version[0]!r} {version[1]!r}; {FORMAT!r} {VERSION} is supported")
    if not digest_fits:
        raise ValueError(f"{MANIFEST}: is damaged (its own digest does not fit)")
    return _records(body.get("files"))


def _records(files: Any) -> list[FileRecord]:
    try:
        records = [FileRecord(name, int(file["size"]), str(file["sha256"])) for name, file in files.items()]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{MANIFEST}: is damaged (its list of files)") from error
    for record in records:
        if not is_plain_name(record.name):
            raise ValueError(f"{MANIFEST}: names a file outside of the checkpoint: {record.name!r}")
    return sorted(records, key=lambda record: (-record.size, record.name))


def is_plain_name(name: str) -> bool:
    """Return True if `name` is that of a file directly inside a directory."""
    return bool(name) and not name.startswith(".") and Path(name).name == name and "\0" not in name


def _file_problem(path: Path, record: FileRecord, hashes: bool, read: Callable[[int], None]) -> str | None:
    try:
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"has {size} bytes instead of {record.size}"
        if not hashes:
            return None
        digest = _sha256(path, read)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if digest == record.sha256 else "is damaged (its sha256 is not the one in the manifest)"


def _sha256(path: Path, read: Callable[[int], None]) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            read(done)
    return digest.hexdigest()
