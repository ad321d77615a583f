"""Input files: those named by a path, directory or glob in a stable order, their format, compression and changes.

Of a dataset directory the training split is read. Splits are found as on the Hub: by train, validation, test
(and their usual variants) in the name of a file or directory, by `SPLIT-00000-of-00005`, and by dataset_dict.json and
state.json of `save_to_disk`.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from megalaunch.data.errors import DataError, cannot, refuse_special_file
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.remote_file import InputPath, RemoteFile, list_remote
from megalaunch.data.remote_store import is_remote

RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLES = (Format.PARQUET, Format.ARROW)
_TABLE_FORMATS = {".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".feather": Format.ARROW}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
CORRECT_PATH = "Correct the path, or allow reading."
START_AGAIN = "Start again when nothing writes to it any more, or read a copy."
STDIN = "-"
TRAIN = "train"
_TABLES_AND_RECORDS = {*RECORD_SUFFIXES, *_TABLE_FORMATS}
_TEXTS = {".txt", ".text", ".raw", ".tokens"}
_SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SPLIT_NAME = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_SPLIT_NAMES)})(?=$|[-._ 0-9])", re.IGNORECASE)
_SHARD = re.compile(r"^(?:.*[-.])?(?P<split>\w+)[-.]\d{5}-of-\d{5}", re.ASCII)
_NO_SPLITS = {"data", "part", "shard", "chunk", "file"}  # `part-00000-of-00005` is a shard, not a split
_METADATA_NAMES = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "croissant.json"}
_METADATA_STEMS = {"readme", "license", "licence", "notice", "copying", "citation", "changelog", "requirements"}
_METADATA_SUFFIXES = {".md", ".rst", ".py", ".ipynb", ".yaml", ".yml", ".lock", ".cff", ".sh"}
_SHOWN = 3


@dataclass(frozen=True)
class Input:
    """One input file, or standard input (path `-`).

    Attributes:
        path: its path or URL.
        format: how its records are parsed.
        compression: suffix of its compression; empty for none.
        size: bytes as stored, at the start.
        changed: modification time at the start, ns; of a remote file its version there.
        name: its path relative to the directory or glob that it was found by; documents are named after it.
        etag: of a remote file the store's hash of its content; empty if it has none.
    """

    path: InputPath
    format: Format
    compression: str
    size: int
    changed: int | str
    name: str = ""
    etag: str = ""

    @property
    def is_stdin(self) -> bool:
        """Whether this is standard input."""
        return str(self.path) == STDIN

    @property
    def is_plain(self) -> bool:
        """Whether it can be read from any offset (not compressed, not standard input)."""
        return not self.compression and not self.is_stdin

    @property
    def is_remote(self) -> bool:
        """Whether it has a URL. The main process reads it then, and sends its content to the workers."""
        return isinstance(self.path, RemoteFile)


def find_inputs(sources: Sequence[str], kind: Format, note: Callable[[str], None] = lambda text: None) -> list[Input]:
    """Return the files of all sources in order: files, directories, globs (each sorted), URLs, `-` for standard input.

    Of a dataset directory only the training split is read; `note` is called with what is left out.

    Raises:
        DataError: a source matches nothing or cannot be read, standard input is given twice, or its format is not
            jsonl.
    """
    found: list[Input] = []
    for source in sources:
        if source == STDIN:
            found.append(Input(Path(STDIN), Format.JSONL if kind is Format.AUTO else kind, "", 0, 0))
        else:
            folder, files = _list_source(source)
            if folder is not None and kind is not Format.TEXT:
                chosen = select_files(folder, files)
                files = chosen.files
                for text in chosen.notes:
                    note(text)
            if not files:
                raise DataError("no such input", file=source, fix="Inputs are files, folders, globs, URLs and -.")
            found += [describe(file.path, kind, file.name) for file in files]
    stdin = [entry for entry in found if entry.is_stdin]
    if len(stdin) > 1:
        raise DataError("standard input is named twice", fix="Give - once.")
    if stdin and stdin[0].format is not Format.JSONL:
        raise DataError("standard input is read as jsonl only", fix="Give --format jsonl, or files.")
    return found


def _list_source(source: str) -> tuple[InputPath | None, tuple[CorpusFile, ...]]:
    """Return the folder that a source is, if it is one, and its files."""
    if is_remote(source):
        listing = list_remote(source)
        return listing.folder, tuple(CorpusFile(file, name) for file, name in listing.files)
    folder = Path(source).expanduser()
    return folder if folder.is_dir() else None, list_files(source)


def describe(path: InputPath, kind: Format, name: str = "") -> Input:
    """Return format and compression of a file by its suffixes; DataError if it is missing or is a compressed table."""
    suffix, compression = _suffixes(path.name)
    if kind is Format.AUTO:
        kind = Format.JSONL if suffix in RECORD_SUFFIXES else _TABLE_FORMATS.get(suffix, Format.TEXT)
    if kind in TABLES and compression:
        fix = f"Decompress it first, or name it without {compression}."
        raise DataError(f"{kind} files have their own compression and are not compressed again", file=path, fix=fix)
    if isinstance(path, RemoteFile):
        remote = path.listed or path.status()
        return Input(path, kind, compression, remote.size, remote.version, name, remote.etag)
    try:
        status = path.stat()
    except OSError as error:
        raise cannot("read it", path, error, CORRECT_PATH) from error
    return Input(path, kind, compression, status.st_size, status.st_mtime_ns, name)


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Compare size and modification time of each input, or a remote one's version, with those at the start.

    A file that was written to while it was read may lack lines or have partial ones.

    Raises:
        DataError: an input has changed or was removed.
    """
    for entry in inputs:
        if entry.is_stdin:
            continue
        size, changed = _state_now(entry.path)
        if size != entry.size:
            cause = f"it changed while it was read: {entry.size:,} bytes at the start, {size:,} now"
            raise DataError(cause, file=entry.path, fix=START_AGAIN)
        if changed != entry.changed:
            what = "version" if entry.is_remote else "modification time"
            cause = f"it changed while it was read (its {what} differs from that at the start)"
            raise DataError(cause, file=entry.path, fix=START_AGAIN)


def _state_now(path: InputPath) -> tuple[int, int | str]:
    """Return size and modification time, or version. Raises DataError."""
    if isinstance(path, RemoteFile):
        remote = path.status()
        return remote.size, remote.version
    try:
        status = path.stat()
    except OSError as error:
        raise cannot("find it again after it was read", path, error, START_AGAIN) from error
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class CorpusFile:
    """One file of a corpus; `name` is the prefix of its documents' names."""

    path: InputPath
    name: str

    def size(self) -> int:
        """Return the size in bytes."""
        return describe(self.path, Format.TEXT).size

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
            refuse_special_file(path)
    except OSError as error:
        raise cannot("read it", Path(error.filename or path), error, CORRECT_PATH) from error
    return ()


def open_source(path: InputPath) -> BufferedReader:
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


@dataclass(frozen=True)
class SelectedFiles:
    """The files to read, and one note for each group of files left out."""

    files: tuple[CorpusFile, ...]
    notes: tuple[str, ...] = ()


def select_files(root: InputPath, files: Sequence[CorpusFile], default: str | None = TRAIN) -> SelectedFiles:
    """Select the data files of a directory, of the split `default` if it has several splits.

    A directory of plain texts without splits is used completely: a README is then a document like the others.

    Raises:
        DataError: there are several splits and none is `default`.
    """
    data = _data_files(root, files)
    if not data:
        return SelectedFiles(tuple(files))
    saved, unlisted = _saved_to_disk(root, files, data)
    known = set(data) - set(unlisted)
    data = [file for file in data if file in known]
    others = [file for file in files if file not in known]
    splits = _splits(data, saved, texts=all(_kind(file) in _TEXTS for file in data))
    if splits is None:
        return SelectedFiles(tuple(data), _skipped_note(root, others))
    named = {name: members for name, members in splits.items() if name}
    if len(named) == 1 and "" not in splits:
        chosen, notes = next(iter(named.values())), []
    elif default in named:
        chosen = named[default]
        notes = [_split_note(root, str(default), splits)]
    else:
        shown = ", ".join(f"{name} ({_name_files(root, members, files)})" for name, members in sorted(named.items()))
        lacking = "" if default is None else f", none of which is called {default}"
        raise DataError(f"it holds several splits{lacking}: {shown}", file=root, fix="Name the files of one of them.")
    return SelectedFiles(tuple(chosen), (*notes, *_skipped_note(root, others)))


def _data_files(root: InputPath, files: Sequence[CorpusFile]) -> list[CorpusFile]:
    """Return the files that may be data; empty for a directory of plain texts, where all files are data."""
    if any(_kind(file) in _TABLES_AND_RECORDS and not _is_metadata(file) for file in files):
        taken = _TABLES_AND_RECORDS | _TEXTS
        return [file for file in files if _kind(file) in taken and not _is_metadata(file)]
    if _has_dataset_card(root, files) or _is_texts_in_splits(files):
        return [file for file in files if _kind(file) not in _METADATA_SUFFIXES and not _is_metadata(file)]
    return []


def _kind(file: CorpusFile) -> str:
    """Return the suffix for a file's content type, without the suffix of a compression."""
    return _suffixes(file.name)[0]


def _suffixes(name: str) -> tuple[str, str]:
    """Return the suffixes for a file's content type and for its compression ("" for none), in lower case."""
    path = PurePosixPath(name.lower())
    return (PurePosixPath(path.stem).suffix, path.suffix) if path.suffix in COMPRESSIONS else (path.suffix, "")


def _is_metadata(file: CorpusFile) -> bool:
    """Return whether a file describes the dataset (README, license, metadata)."""
    name = PurePosixPath(file.name).name.lower()
    return name in _METADATA_NAMES or re.split(r"[.\-_]", name)[0] in _METADATA_STEMS


def _has_dataset_card(root: InputPath, files: Sequence[CorpusFile]) -> bool:
    """Return whether README.md begins with the Hub's metadata block."""
    return _content(root / "README.md", files)[:4] == b"---\n"


def _is_texts_in_splits(files: Sequence[CorpusFile]) -> bool:
    data = [file for file in files if not _is_metadata(file) and _kind(file) not in _METADATA_SUFFIXES]
    return all(_kind(file) in _TEXTS for file in data) and _splits(data, {}, texts=True) is not None


def _splits(data: Sequence[CorpusFile], saved: dict[str, str], texts: bool) -> dict[str, list[CorpusFile]] | None:
    """Return the files by split (those without one under ""); None if there are no splits.

    Titles may contain the name of a split: `texts` have splits only if every file has one and there are several.
    """
    found: dict[str, list[CorpusFile]] = {}
    for file in data:
        found.setdefault(_split_name(file, saved), []).append(file)
    if texts and ("" in found or len(found) < 2):
        return None
    return found if any(found) else None


def _split_name(file: CorpusFile, saved: dict[str, str]) -> str:
    """Return the split of a file by its directory, shard name, or a split's name in its path; "" without one."""
    path = PurePosixPath(file.name)
    for part in path.parts[:-1]:
        if part in saved:
            return saved[part]
    shard = _SHARD.match(path.name)
    if shard and shard["split"].lower() not in {*_NO_SPLITS, *_SPLIT_NAMES} and not shard["split"].isdigit():
        return shard["split"]
    for part in reversed(path.parts):
        if found := _SPLIT_NAME.search(part):
            return _SPLIT_NAMES[found[1].lower()]
    return ""


def _saved_to_disk(
    root: InputPath, files: Sequence[CorpusFile], data: Sequence[CorpusFile]
) -> tuple[dict[str, str], list[CorpusFile]]:
    """Return the splits listed in dataset_dict.json by directory, and the files not listed in state.json (cache)."""
    listed = _read(root / "dataset_dict.json", files).get("splits")
    saved = {name: name for name in listed if isinstance(name, str)} if isinstance(listed, list) else {}
    unlisted = []
    for folder in {file.path.parent for file in data}:
        entries = _read(folder / "state.json", files).get("_data_files")
        if not isinstance(entries, list):
            continue
        names = {entry.get("filename") for entry in entries if isinstance(entry, dict)}
        unlisted += [file for file in data if file.path.parent == folder and file.path.name not in names]
    return saved, unlisted


def _read(path: InputPath, files: Sequence[CorpusFile]) -> dict[str, Any]:
    try:
        found = json.loads(_content(path, files) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(path: InputPath, files: Sequence[CorpusFile]) -> bytes:
    """Return the content of a file if it is one of these and can be read, else nothing."""
    known = next((file.path for file in files if file.path == path), None)
    try:
        return b"" if known is None else known.read_bytes()
    except (DataError, OSError):
        return b""


def _split_note(root: InputPath, chosen: str, splits: dict[str, list[CorpusFile]]) -> str:
    everything = [file for members in splits.values() for file in members]
    left = [
        f"split {name} ({_name_files(root, members, everything)})"
        if name
        else f"without a split: {_join_names(members)}"
        for name, members in sorted(splits.items(), key=lambda item: (not item[0], item[0]))
        if name != chosen
    ]
    return f"{root}: read split {chosen} ({_count(splits[chosen])}); left out {', '.join(left)}"


def _skipped_note(root: InputPath, others: Sequence[CorpusFile]) -> tuple[str, ...]:
    return (f"{root}: left out files without data: {_join_names(others)}",) if others else ()


def _name_files(root: InputPath, members: Sequence[CorpusFile], everything: Sequence[CorpusFile]) -> str:
    """Return a name for exactly these files: a file, a glob, or their number."""
    if len(members) == 1:
        return str(members[0].path)
    first, last = min(file.name for file in members), max(file.name for file in members)
    differing = (number for number, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    common = first[: next(differing, len(first))]
    same = [file for file in everything if file.name.startswith(common)]
    if not common or len(same) > len(members):
        return _count(members)
    folder, _, rest = common.rpartition("/")
    return f"{root / folder}" if folder and not rest else f"'{root / common}*'"


def _join_names(files: Sequence[CorpusFile]) -> str:
    names = [file.name for file in files[:_SHOWN]]
    return ", ".join(names) + (f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else "")


def _count(files: Sequence[CorpusFile]) -> str:
    return f"{len(files):,} file{'s' if len(files) != 1 else ''}"
