"""Input files of preprocessing: their order, format, compression, changes and hashes."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.preprocess.source_files import (
    COMPRESSIONS,
    CORRECT_PATH,
    RECORD_SUFFIXES,
    list_files,
    open_source,
    select_files,
)

STDIN = "-"
TABLES = (Format.PARQUET, Format.ARROW)
_TABLES = {".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".feather": Format.ARROW}
_BLOCK = 1 << 20
_AHEAD = 1 << 28  # bytes that hashing may be ahead of the encoding
START_AGAIN = "Start again when nothing writes to it any more, or read a copy."
# Raised by the decompressors for a truncated or corrupt stream.
_CORRUPT = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, OSError, ValueError)


class CorruptStream(Exception):
    """A compressed file that is truncated or does not decompress; the message has the cause."""


@dataclass(frozen=True)
class Input:
    """One input file, or standard input (path `-`).

    Attributes:
        path: its path.
        format: how its records are parsed.
        compression: suffix of its compression; empty for none.
        size: bytes as stored, at the start.
        changed: modification time at the start, ns.
        name: its path relative to the directory or glob that it was found by; documents are named after it.
    """

    path: Path
    format: Format
    compression: str
    size: int
    changed: int
    name: str = ""

    @property
    def is_stdin(self) -> bool:
        """Whether this is standard input."""
        return str(self.path) == STDIN

    @property
    def is_plain(self) -> bool:
        """Whether it can be read from any offset (not compressed, not standard input)."""
        return not self.compression and not self.is_stdin


def find_inputs(sources: Sequence[str], kind: Format, note: Callable[[str], None] = lambda text: None) -> list[Input]:
    """Return the files of all sources in order: files, directories, globs (each sorted), `-` for standard input.

    Of a dataset directory only the training split is read (source_files.py); `note` is called with what is left out.

    Raises:
        DataError: a source matches nothing, standard input is given twice, or its format is not jsonl.
    """
    found: list[Input] = []
    for source in sources:
        if source == STDIN:
            found.append(Input(Path(STDIN), Format.JSONL if kind is Format.AUTO else kind, "", 0, 0))
        else:
            files = list_files(source)
            if Path(source).expanduser().is_dir() and kind is not Format.TEXT:
                chosen = select_files(Path(source).expanduser(), files)
                files = chosen.files
                for text in chosen.notes:
                    note(text)
            if not files:
                raise DataError("no such input", file=source, fix="Inputs are files, folders, globs and -.")
            found += [describe(file.path, kind, file.name) for file in files]
    stdin = [entry for entry in found if entry.is_stdin]
    if len(stdin) > 1:
        raise DataError("standard input is named twice", fix="Give - once.")
    if stdin and stdin[0].format is not Format.JSONL:
        raise DataError("standard input is read as jsonl only", fix="Give --format jsonl, or files.")
    return found


def describe(path: Path, kind: Format, name: str = "") -> Input:
    """Return format and compression of a file by its suffixes; DataError if it is missing or is a compressed table."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    inner = Path(path.stem).suffix if compression else path.suffix
    if kind is Format.AUTO:
        kind = Format.JSONL if inner in RECORD_SUFFIXES else _TABLES.get(inner, Format.TEXT)
    if kind in TABLES and compression:
        fix = f"Decompress it first, or name it without {compression}."
        raise DataError(f"{kind} files have their own compression and are not compressed again", file=path, fix=fix)
    try:
        status = path.stat()
    except OSError as error:
        raise cannot("read it", path, error, CORRECT_PATH) from error
    return Input(path, kind, compression, status.st_size, status.st_mtime_ns, name)


def check_unchanged(inputs: Iterable[Input]) -> None:
    """Compare size and modification time of each input with those at the start.

    A file that was written to while it was read may lack lines or have partial ones.

    Raises:
        DataError: an input has changed or was removed.
    """
    for entry in inputs:
        if entry.is_stdin:
            continue
        try:
            status = entry.path.stat()
        except OSError as error:
            raise cannot("find it again after it was read", entry.path, error, START_AGAIN) from error
        if status.st_size != entry.size:
            cause = f"it changed while it was read: {entry.size:,} bytes at the start, {status.st_size:,} now"
            raise DataError(cause, file=entry.path, fix=START_AGAIN)
        if status.st_mtime_ns != entry.changed:
            cause = "it changed while it was read (its modification time differs from that at the start)"
            raise DataError(cause, file=entry.path, fix=START_AGAIN)


class DecompressedStream:
    """The decompressed bytes of an input from its start; `stored` counts the stored bytes consumed so far."""

    def __init__(self, source: Input) -> None:
        self._source = source
        self._raw: IO[bytes] = sys.stdin.buffer if source.is_stdin else open_source(source.path)
        self.stored = 0
        self._blocks = self._read()

    def blocks(self) -> Iterator[bytes]:
        """Yield non-empty blocks; raises CorruptStream, or DataError if reading the file fails."""
        try:
            yield from self._blocks
        except _CORRUPT as error:
            if not self._source.compression:
                raise cannot("read it", self._source.path, _as_os_error(error)) from error
            reason = str(error) or type(error).__name__
            raise CorruptStream(f"the {self._source.compression} stream is truncated or corrupt ({reason})") from error
        finally:
            if not self._source.is_stdin:
                self._raw.close()

    def _read(self) -> Iterator[bytes]:
        if self._source.compression == ".zst":
            yield from self._zstandard()
            return
        opened = self._open()
        while block := opened.read(_BLOCK):
            self._count(len(block))
            yield block

    def _open(self) -> Any:
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers[self._source.compression](self._raw) if self._source.compression else self._raw

    def _count(self, size: int) -> None:
        self.stored = self.stored + size if self._source.is_stdin else self._raw.tell()

    def _zstandard(self) -> Iterator[bytes]:
        """Decompress zstandard, with windows of up to 2 GiB and any number of frames."""
        zstandard = import_optional("zstandard", self._source.path)
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        frame_ended = True
        while compressed := self._raw.read(_BLOCK // 8):
            while compressed:
                try:
                    block = decompressor.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise ValueError(str(error)) from None
                frame_ended, compressed = decompressor.eof, decompressor.unused_data if decompressor.eof else b""
                self._count(0)
                if block:
                    yield block
                if frame_ended:  # a file may have several frames
                    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        if not frame_ended:
            raise EOFError("the last frame is not complete")


def lines(path: Path) -> Iterator[bytes]:
    """Yield the decompressed lines of a file with their line ends. DataError if it cannot be read or is corrupt."""
    source = describe(path, Format.TEXT)
    if source.is_plain:
        with open_source(path) as file:
            yield from file
        return
    partial = b""
    try:
        for block in DecompressedStream(source).blocks():
            *complete, partial = (partial + block).split(b"\n")
            yield from (line + b"\n" for line in complete)
    except CorruptStream as error:
        raise DataError(str(error), file=path, fix="Copy the file again, or create it again.") from None
    if partial:
        yield partial


def import_optional(module: str, path: Path) -> Any:
    """Import an optional package of the extra `data`; DataError naming it if it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise DataError(
            f"reading it needs the package {name}", file=path, fix="pip install 'megalaunch[data]' brings it."
        ) from None


def _as_os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(str(error))


class InputHashes:
    """Hashes the inputs in a thread, from `start` or else from `finish`, which waits for them."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._hashes: list[str] = []
        self._error: DataError | None = None
        self._hashed = self._reached = 0
        self._position_changed = threading.Condition()
        self._thread = threading.Thread(target=self._hash_all, daemon=True)

    def start(self) -> None:
        """Start the thread. From then on this process must not fork."""
        self._thread.start()

    def reached(self, position: int) -> None:
        """Report the number of bytes of all inputs that are encoded, which paces the hashing."""
        with self._position_changed:
            self._reached = position
            self._position_changed.notify()

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
                with self._position_changed:
                    self._position_changed.wait_for(lambda: self._hashed <= self._reached + _AHEAD)
        return digest.hexdigest()
