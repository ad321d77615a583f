"""The pool of encoding processes, and the memory they share with their parent."""

from __future__ import annotations

import gc
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk
from megalaunch.data.preprocess.encode_chunk import ChunkEncoder, Encoded, EncoderConfig
from megalaunch.data.preprocess.encoder_backend import Encode, PreloadedEncoder, make_encoder
from megalaunch.data.preprocess.settings import EngineChoice, Fixes
from megalaunch.data.worker_process import WorkerDied, WorkerProcess, is_single_threaded

_AHEAD = 4  # chunks per worker that are being encoded or wait to be written
_SLOT_BYTES = 2  # shared bytes of tokens per byte of text; text has about one token per three bytes


class EncoderPool:
    """`count` encoding processes; with one, this process encodes. A context manager, which ends them.

    Where forking is possible, `start` forks them: they inherit what this process has loaded, and share buffers with it
    that hold most chunks of `chunk_bytes`. Otherwise they are spawned on construction.

    Args:
        count: number of processes.
        chunk_bytes: approximate size of a chunk.
        fixes: what errors suggest to the user.

    Raises:
        DataError: the system refuses so many processes.
    """

    def __init__(self, count: int, chunk_bytes: int, fixes: Fixes) -> None:
        self._count, self._chunk_bytes, self._fixes = count, chunk_bytes, fixes
        self._local = EncodeWorker()
        self._buffers: SharedBuffers | None = None
        self._workers: list[WorkerProcess[EncodeWorker]] = []
        if count > 1 and not is_single_threaded():
            self._spawn()
        self._prefetched: EncoderConfig | None = None
        self._pending: deque[tuple[Chunk, int | None, Future[tuple[Encoded, list[int] | None]]]] = deque()

    def start(self, preloaded: PreloadedEncoder | None) -> None:
        """Start the worker processes; forked workers inherit the preloaded encoder. DataError as on construction."""
        if self._count == 1:
            self._local = EncodeWorker(preloaded)
            return
        if not self._workers and not is_single_threaded():  # a thread was started meanwhile
            self._spawn()
        if self._workers:
            return
        with self._refusals():
            self._buffers = buffers = SharedBuffers(_AHEAD * self._count + 1, _SLOT_BYTES * self._chunk_bytes)
            for _ in range(self._count):
                self._workers.append(WorkerProcess(True, _make_forked_worker, preloaded, buffers))

    def prefetch(self, chunks: Iterator[Chunk], config: EncoderConfig) -> None:
        """Start encoding the first chunks before it is known whether `encode` will use the same config."""
        self._prefetched = config
        self._submit(chunks, config, _AHEAD * len(self._workers))

    def encode(self, chunks: Iterator[Chunk], config: EncoderConfig) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Prefetched chunks come first; they are encoded again if the config differs.

        Raises:
            DataError: a worker died, or reading or encoding failed.
        """
        if not self._workers:
            for chunk in chunks:
                encoded, _ = self._local.encode(config, chunk, None)
                yield chunk, encoded
            return
        if config != self._prefetched:
            chunks = chain(self._requeue(), chunks)
            self._submit(chunks, config, _AHEAD * len(self._workers))
        while self._pending:
            chunk, slot, future = self._pending.popleft()
            encoded, sizes = self._wait(future)
            self._submit(chunks, config, 1)
            if self._buffers is None or slot is None:
                yield chunk, encoded
                continue
            if sizes is not None:
                self._buffers.read(slot, encoded, sizes)
            yield chunk, encoded
            self._buffers.free(slot)
        self._kill()  # no more work: the processes end while the rest is written

    def _submit(self, chunks: Iterator[Chunk], config: EncoderConfig, count: int) -> None:
        for chunk in islice(chunks, count):
            slot = None if self._buffers is None else self._buffers.take()
            worker = min(self._workers, key=lambda worker: worker.is_busy)
            self._pending.append((chunk, slot, worker.submit(EncodeWorker.encode, config, chunk, slot)))

    def _requeue(self) -> list[Chunk]:
        """Wait for the prefetched chunks to finish, free their slots, and return the chunks."""
        prefetched, self._pending = self._pending, deque()
        for _, slot, future in prefetched:
            future.exception()
            if self._buffers is not None and slot is not None:
                self._buffers.free(slot)
        return [chunk for chunk, _, _ in prefetched]

    def _wait(self, future: Future[tuple[Encoded, list[int] | None]]) -> tuple[Encoded, list[int] | None]:
        try:
            return future.result()
        except WorkerDied:
            raise DataError("a worker process died, perhaps for lack of memory", fix=self._fixes.worker_died) from None

    def _spawn(self) -> None:
        with self._refusals():
            for _ in range(self._count):
                self._workers.append(WorkerProcess(False, EncodeWorker))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """End the workers started so far, and raise DataError, if the system refuses memory, a process or a file."""
        try:
            yield
        except (OSError, OverflowError) as error:
            self.__exit__()
            reason = error.strerror if isinstance(error, OSError) else "too many"
            cause = f"cannot start {self._count:,} worker processes: {reason}"
            raise DataError(cause, fix=self._fixes.no_workers) from error

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(self, *raised: object) -> None:
        """End the processes and drop their work."""
        self._kill()
        for worker in self._workers:
            worker.close()


class EncodeWorker:
    """Encodes chunks, and holds the encoder of the last config.

    Args:
        preloaded: encoder that was loaded before the process started.
        buffers: memory shared with the parent, if forked.
    """

    def __init__(self, preloaded: PreloadedEncoder | None = None, buffers: SharedBuffers | None = None) -> None:
        self._preloaded, self._buffers = preloaded, buffers
        self._last: tuple[EncoderConfig, ChunkEncoder] | None = None

    def encode(self, config: EncoderConfig, chunk: Chunk, slot: int | None) -> tuple[Encoded, list[int] | None]:
        """Encode a chunk. If token counts are returned, the tokens of each key are in the shared slot."""
        if self._last is None or self._last[0] != config:
            self._last = config, ChunkEncoder(config, self._load_encoder)
        encoded = self._last[1].encode(chunk)
        sizes = None
        if self._buffers is not None and slot is not None:
            sizes = self._buffers.write(slot, encoded, config.dtype)
        if sizes is None:
            encoded.cast(config.dtype)
        return encoded, sizes

    def _load_encoder(self, engine: EngineChoice, content: str) -> Encode:
        early = self._preloaded
        if engine is EngineChoice.GIGATOKEN and early is not None and early.content == content:
            return early.encode
        return make_encoder(engine, content)


def _make_forked_worker(preloaded: PreloadedEncoder | None, buffers: SharedBuffers) -> EncodeWorker:
    gc.freeze()  # pages that the garbage collector does not visit stay shared with the parent
    return EncodeWorker(preloaded, buffers)


class SharedBuffers:
    """`count` slots of `size` bytes; a chunk's tokens occupy one until `free`, when they are written to the file."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._memory = mmap.mmap(-1, count * size)  # untouched pages take no memory
        self._free = list(range(count))

    def take(self) -> int:
        """Return a free slot."""
        return self._free.pop()

    def free(self, slot: int) -> None:
        """Release a slot."""
        self._free.append(slot)

    def write(self, slot: int, encoded: Encoded, dtype: np.dtype[Any]) -> list[int] | None:
        """In a worker: write the tokens of each key as `dtype` and return their numbers; None if they do not fit."""
        sizes = [key.tokens.size for key in encoded.keys]
        if sum(sizes) * dtype.itemsize > self._size:
            return None
        start = slot * self._size
        for key, size in zip(encoded.keys, sizes, strict=True):
            self._view(start, size, dtype)[:] = key.tokens
            start += size * dtype.itemsize
        encoded.keys = [replace(key, tokens=np.empty(0, dtype)) for key in encoded.keys]
        return sizes

    def read(self, slot: int, encoded: Encoded, sizes: Sequence[int]) -> None:
        """In the parent: give each key a view of its tokens in the slot."""
        start = slot * self._size
        for number, (key, size) in enumerate(zip(encoded.keys, sizes, strict=True)):
            tokens = self._view(start, size, key.tokens.dtype)
            encoded.keys[number] = replace(key, tokens=tokens)
            start += tokens.nbytes

    def _view(self, start: int, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self._memory, dtype, size, start)
