"""The progress of a preprocessing run, and the hidden work directory that saves it and the output so far.

The directory survives any interruption. It holds for each token file the tokens, the length of each sequence and the
number of sequences of each document, and `state.json` with the sizes up to which all of them are synced to disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.block_hashes import BlockHashes, describe, hash_file
from megalaunch.data.indexed_dataset.builder import copy_index
from megalaunch.data.indexed_dataset.dataset import bin_path, idx_path
from megalaunch.data.preprocess.chunking import Chunk, Position
from megalaunch.data.preprocess.encode_chunk import BadRecord, Encoded, EncodedKey
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.settings import OnBadRecord, Settings
from megalaunch.data.tokenizer.tokenizer import tokenizer_file
from megalaunch.fs import PUBLIC_FILE_MODE, lock_file, sync_directory, write_file_atomically

_PARTS = ("bin", "lengths", "documents")
_SYNCED_AT_ONCE = 1 << 23  # bytes between syncs, about as many as are left for the final one
BAD_RECORDS_LISTED = 1000
# Increment when the same inputs and settings would give different files.
_RECIPE_VERSION = 2
_MORE_BAD = "Mend the input, or raise --max-bad."


@dataclass
class Progress:
    """Counts so far; documents = written + skipped + quarantined. Bytes are those of the inputs as stored."""

    bytes_total: int
    bytes_read: int = 0
    documents: int = 0
    written: int = 0
    skipped: int = 0
    quarantined: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class State:
    """Everything that a resumed run needs; `line` is the line of `position` in its file, counted from 0."""

    counts: Progress
    position: Position = field(default_factory=lambda: Position(0, 0))
    line: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def count_chunk(self, chunk: Chunk, encoded: Encoded, settings: Settings, lines_before: int = 0) -> list[bytes]:
        """Count a chunk and return its lines for the quarantine; `lines_before` are those of its file before the job.

        Raises:
            DataError: a bad record stops the run, or there are more than `max_bad`. Nothing is counted then.
        """
        on_bad_record, stop_fix = settings.on_bad_record, settings.fixes.bad_record
        lines: list[bytes] = []
        listed: list[dict[str, Any]] = []
        for bad in encoded.bad:
            line = bad.line(lines_before + self.line)
            if on_bad_record is OnBadRecord.STOP:
                raise DataError(bad.cause, file=bad.path, record=line, fix=f"{bad.fix} {stop_fix}".strip())
            if len(self.bad) + len(listed) < BAD_RECORDS_LISTED:
                listed.append({"file": str(bad.path), "line": line, "cause": bad.cause})
            if on_bad_record is OnBadRecord.QUARANTINE:
                lines.append(_quarantine_line(bad, line))
        counts, left_out = self.counts, len(encoded.bad)
        _refuse_too_many(counts.skipped + counts.quarantined + left_out, settings, [*self.bad, *listed])
        self.bad += listed
        counts.documents += encoded.records
        counts.written += encoded.records - left_out
        counts.quarantined += len(lines)
        counts.skipped += left_out - len(lines)
        counts.tokens += sum(key.tokens.size for key in encoded.keys)
        counts.bytes_read += chunk.stored
        self.line = self.line + encoded.lines if chunk.end.file == self.position.file else 0
        self.position = chunk.end
        return lines

    def check_complete(self, sources: str, settings: Settings) -> None:
        """Raise DataError if the inputs had no valid documents, or more bad ones than `max_bad` allows."""
        counts = self.counts
        left_out = counts.skipped + counts.quarantined
        if not counts.documents:
            raise DataError("the inputs hold no documents", file=sources, fix="Give files with text.")
        if not counts.written:
            raise none_usable(left_out, sources, self.bad)
        _refuse_too_many(left_out, settings, self.bad)
        share = settings.max_bad.share
        if share is not None and left_out > share * counts.documents:
            cause = (
                f"{left_out:,} of {counts.documents:,} records are bad, {left_out / counts.documents:.2%}; "
                f"--max-bad allows {settings.max_bad}{_first_of(self.bad)}"
            )
            raise DataError(cause, file=sources, fix=_MORE_BAD)

    def to_save(self) -> dict[str, Any]:
        """Return the state as JSON data for `load`."""
        return asdict(self)

    @staticmethod
    def load(saved: dict[str, Any]) -> State:
        """Return the state from the data of `to_save`."""
        return State(
            counts=Progress(**saved["counts"]),
            position=Position(**saved["position"]),
            line=saved["line"],
            bad=saved["bad"],
            complete=saved["complete"],
        )


def _refuse_too_many(found: int, settings: Settings, bad: Sequence[dict[str, Any]]) -> None:
    allowed = settings.max_bad.count
    if allowed is not None and found > allowed:
        cause = f"{found:,} records are bad, --max-bad allows {settings.max_bad}{_first_of(bad)}"
        raise DataError(cause, fix=_MORE_BAD)


def _first_of(bad: Sequence[dict[str, Any]]) -> str:
    """Return the place and cause of the first of some bad records, as the end of a sentence; "" without any."""
    if not bad:
        return ""
    place = bad[0]["file"] + ("" if bad[0]["line"] is None else f", line {bad[0]['line']}")
    return f", the first: {place}: {bad[0]['cause']}"


def records_left_out(left_out: int, records: int, bad: Sequence[dict[str, Any]]) -> str:
    """Return the number of records left out, of all, with the first of them, as text."""
    return f"{left_out:,} of {records:,} records left out{_first_of(bad)}"


def none_usable(left_out: int, sources: str, bad: Sequence[dict[str, Any]], fix: str = "") -> DataError:
    """Return the error of inputs all of whose records were left out."""
    return DataError(f"none of the {left_out:,} records can be used{_first_of(bad)}", file=sources, fix=fix)


def _quarantine_line(bad: BadRecord, line: int | None) -> bytes:
    content = bad.content.decode("utf-8", "backslashreplace")
    entry = {"file": str(bad.path), "line": line, "cause": bad.cause, "record": content}
    return json.dumps(entry).encode() + b"\n"


def resume_fingerprint(inputs: Sequence[Input], settings: Settings, tokenizer: str) -> dict[str, str]:
    """Hash everything that must be unchanged for a resumed run to write the same bytes, by name.

    `tokenizer` is the content of a tokenizer.json.
    """
    files = [[str(entry.path.absolute()), entry.format, entry.size, entry.changed] for entry in inputs]
    written = [settings.append_eod, settings.add_special_tokens, list(settings.json_keys), settings.language]
    options = [_RECIPE_VERSION, *written, settings.record_bytes]
    parts = {"inputs": json.dumps(files), "tokenizer": tokenizer, "settings": json.dumps(options)}
    return {name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for name, text in parts.items()}


def tokenizer_fingerprint(settings: Settings) -> str:
    """Hash the files and options of the tokenizer, which is not loaded. Raises DataError if it cannot be read."""
    try:
        files = [tokenizer_file(settings.tokenizer), *([settings.merges] if settings.merges else [])]
        hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    except OSError as error:
        raise cannot("read it", settings.tokenizer, error, "Correct the path, or allow reading.") from error
    return hashes + json.dumps(asdict(settings.tiktoken))


def work_folder(output_prefix: Path) -> Path:
    """Return the work directory of an output prefix, which a run that was interrupted leaves."""
    return output_prefix.with_name(f".{output_prefix.name}.preprocess")


class WorkDir:
    """The work directory of one output prefix, locked by one process; a context manager, which releases it.

    Args:
        output_prefix: start of the output's names.
        finals: prefixes of the token files: one a key, or one a part of the documents.
        dtype: dtype of the stored tokens.
        disk_full: the fix for a failed write.

    Raises:
        DataError: another process is writing the same prefix, or the directory is not writable.
    """

    def __init__(self, output_prefix: Path, finals: Sequence[Path], dtype: np.dtype[Any], disk_full: str) -> None:
        self.finals, self.dtype = tuple(finals), dtype
        self._disk_full, self._published = disk_full, False
        self.folder = work_folder(output_prefix)
        self._state = self.folder / "state.json"
        self._files: dict[str, int] = {}
        self._hashes = [BlockHashes() for _ in finals]
        self._syncs = [BackgroundFsync() for _ in finals]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.folder / "lock", PUBLIC_FILE_MODE)
        except BlockingIOError:
            fix = "Wait for it, or choose another --output-prefix."
            raise DataError("another process is writing these files", file=output_prefix, fix=fix) from None
        except OSError as error:
            raise cannot("write here", output_prefix, error, "Choose a folder that you may write to.") from error

    def saved_state(self) -> dict[str, Any] | None:
        """Return the state of the last `checkpoint`; None if there was none."""
        try:
            state = json.loads(self._state.read_bytes())
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) and "sizes" in state else None

    def discard_state(self) -> None:
        """Remove the state of the last `checkpoint`, so that it cannot be resumed."""
        self._state.unlink(missing_ok=True)

    def open(self, saved: dict[str, Any] | None) -> None:
        """Open the files for writing: empty, or truncated to their sizes at the checkpoint `saved`."""
        if saved is not None and saved["complete"]:
            return  # nothing more is added, and an interrupted publish may have renamed files already
        sizes = {} if saved is None else saved["sizes"]
        try:
            if saved is None:
                self._state.unlink(missing_ok=True)
            for name in self._names():
                self._open_at(name, int(sizes.get(name, 0)))
            for number in range(len(self.finals)):
                size = int(sizes.get(f"{number}.bin", 0))
                self._hashes[number] = hash_file(self.folder / f"{number}.bin", size)
        except OSError as error:
            raise cannot("write here", self.folder, error, self._disk_full) from error

    def save_tokenizer(self, content: str) -> Path:
        """Write a tokenizer.json for the workers and return its path."""
        path = self.folder / "tokenizer.json"
        try:
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise cannot("write here", self.folder, error, self._disk_full) from error
        return path

    def _open_at(self, name: str, size: int) -> None:
        file = self._files[name] = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(file).st_size < size:
            fix = "Start without --resume."
            raise DataError("it is shorter than when it was saved", file=self.folder / name, fix=fix)
        os.ftruncate(file, size)
        os.lseek(file, size, os.SEEK_SET)

    def add(self, keys: Sequence[EncodedKey], quarantined: Sequence[bytes]) -> None:
        """Append the documents of a chunk, and lines for the quarantine."""
        try:
            for number, key in enumerate(keys):
                self._append(f"{number}.bin", key.tokens)
                self._syncs[number].notify_written(self._files[f"{number}.bin"], key.tokens.nbytes)
                self._hashes[number].add(key.tokens.view(np.uint8).data)
                self._append(f"{number}.lengths", key.lengths)
                self._append(f"{number}.documents", key.documents)
            self._append("quarantine", b"".join(quarantined))
        except OSError as error:
            raise cannot("write it", self.finals[0], error, self._disk_full) from error

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Flush everything that was added to disk, and save `state` with the sizes of the files."""
        try:
            for sync in self._syncs:
                sync.finish()
            for file in self._files.values():
                os.fdatasync(file)
            sizes = {name: os.lseek(file, 0, os.SEEK_CUR) for name, file in self._files.items()}
            write_file_atomically(self._state, json.dumps({**state, "sizes": sizes}), PUBLIC_FILE_MODE)
        except OSError as error:
            raise cannot("write it", self.finals[0], error, self._disk_full) from error

    def build_indexes(self) -> dict[str, Any]:
        """Build the index files; return size and hashes of all files by final name, for the report."""
        described = {}
        try:
            for number, final in enumerate(self.finals):
                tokens, index = self._parts(number)
                if tokens.exists():
                    with index.open("wb") as file:
                        lengths, documents = (self.folder / f"{number}.{part}" for part in _PARTS[1:])
                        copy_index(file, self.dtype, lengths, documents)
                        file.flush()
                        os.fsync(file.fileno())
                    known = self._hashes[number] if self._files else hash_file(tokens)
                    described[bin_path(final).name] = describe(tokens, known)
                else:
                    described[bin_path(final).name] = describe(bin_path(final))
                described[idx_path(final).name] = describe(index if index.exists() else idx_path(final))
        except OSError as error:
            raise cannot("write it", self.finals[0], error, self._disk_full) from error
        return described

    def publish(self, quarantine: Path | None) -> None:
        """Rename all files to their final names, each index last; a repeated call continues an interrupted one."""
        try:
            for number, final in enumerate(self.finals):
                tokens, index = self._parts(number)
                if tokens.exists():
                    idx_path(final).unlink(missing_ok=True)
                    tokens.replace(bin_path(final))
                if index.exists():
                    index.replace(idx_path(final))
            if quarantine is not None and (self.folder / "quarantine").exists():
                (self.folder / "quarantine").replace(quarantine)
            sync_directory(self.finals[0].parent)
            self._published = True
        except OSError as error:
            raise cannot("write it", self.finals[0], error, self._disk_full) from error

    def _parts(self, number: int) -> tuple[Path, Path]:
        return self.folder / f"{number}.bin", self.folder / f"{number}.idx"

    def __enter__(self) -> WorkDir:
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the files and release the lock; remove the directory unless a later run can resume from it."""
        for sync in self._syncs:
            sync.close()
        for file in self._files.values():
            os.close(file)
        if self._published or self.saved_state() is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _append(self, name: str, content: bytes | NDArray[Any]) -> None:
        left = memoryview(content) if isinstance(content, bytes) else content.view(np.uint8).data
        while left:
            left = left[os.write(self._files[name], left) :]

    def _names(self) -> list[str]:
        return [f"{number}.{part}" for number in range(len(self.finals)) for part in _PARTS] + ["quarantine"]


class BackgroundFsync:
    """Calls fdatasync on a file from time to time in a thread; `finish` raises its errors."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._written = 0

    def notify_written(self, file: int, size: int) -> None:
        """Count `size` bytes appended to a file descriptor, which must stay open until `finish`."""
        self._written += size
        if self._written < _SYNCED_AT_ONCE or (self._running is not None and not self._running.done()):
            return
        self.finish()
        self._written = 0
        self._running = self._thread.submit(os.fdatasync, file)

    def finish(self) -> None:
        """Wait for the running sync. Raises its OSError, since the kernel reports a failed write only once."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait and end the thread; errors are ignored."""
        self._thread.shutdown()
