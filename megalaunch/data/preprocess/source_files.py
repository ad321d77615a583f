"""Files named by a path, directory or glob, in a stable order."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from megalaunch.data.errors import DataError, cannot

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CORRECT_PATH = "Correct the path, or allow reading."


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus; `name` is the prefix of its documents' names."""

    path: Path
    name: str

    def size(self) -> int:
        """Return the size in bytes."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise cannot("read it", self.path, error, CORRECT_PATH) from error

    def sha256(self) -> str:
        """Return the hash of the content."""
        with open_source(self.path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(source: str) -> tuple[CorpusFile, ...]:
    """Return the files of a path or glob in order; empty if nothing matches."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return walk_files(path, set(), "")
        if path.is_file():
            return (CorpusFile(path, path.name),)
        if glob.has_magic(source):
            return _matching(str(path))
        if path.exists():
            refuse_special(path)
    except OSError as error:
        raise cannot("read it", Path(error.filename or path), error, CORRECT_PATH) from error
    return ()


def refuse_special(path: Path) -> None:
    """Raise DataError for a device, a pipe or a socket, which may never end; OSError if the path does not exist."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError("it is no regular file or folder", file=path, fix="Name a file.")


def open_source(path: Path) -> BufferedReader:
    """Open a file of the corpus; DataError if that fails."""
    try:
        return path.open("rb")
    except OSError as error:
        raise cannot("read it", path, error, CORRECT_PATH) from error


def walk_files(root: Path, left_out: set[str], suffix: str) -> tuple[CorpusFile, ...]:
    """Return the files below a directory by path, without hidden ones and directories named in `left_out`."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would skip a directory that cannot be listed

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        # Pruned in place, so that os.walk does not enter directories left out.
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith("."))
        found += [CorpusFile(path, path.relative_to(root).as_posix()) for path in paths if path.is_file()]
    if not found:
        raise DataError(f"the folder holds no {suffix or 'readable'} files", file=root, fix="Correct the path.")
    return tuple(sorted(found, key=lambda file: file.name))


def _matching(pattern: str) -> tuple[CorpusFile, ...]:
    """Return the files that match a glob, named relative to its part before the first wildcard."""
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    # Unlike Path.glob, this excludes hidden files and lets a final ** match files.
    matches = glob.iglob(pattern, recursive=True)  # noqa: PTH207
    paths = [path for path in map(Path, matches) if path.is_file()]
    if not paths:
        raise DataError("no file matches this corpus", file=pattern, fix="Quote the glob, and look for ** and suffix.")
    return tuple(sorted((CorpusFile(path, path.relative_to(root).as_posix()) for path in paths), key=lambda f: f.name))
