"""Output of preprocessing: a hidden work directory that survives any interruption, and the final files made from it.

The directory holds for each key the tokens, the length of each sequence and the number of sequences of each document,
and `state.json` with the sizes up to which all of them are safely on disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.block_hashes import BlockHashes, describe, hash_file
from megalaunch.data.indexed_dataset.builder import copy_index
from megalaunch.data.indexed_dataset.dataset import bin_path, idx_path
from megalaunch.data.preprocess.encode_chunk import EncodedKey
from megalaunch.fs import PUBLIC_FILE_MODE, lock_file, sync_directory, write_file_atomically

_PARTS = ("bin", "lengths", "documents")
_SYNCED_AT_ONCE = 1 << 23  # bytes between syncs, about as many as are left for the final one


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
        self.folder = output_prefix.with_name(f".{output_prefix.name}.preprocess")
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
            return  # nothing more is added, and an interrupted publish may already have renamed files
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
