"""The pool of encoding processes, and the memory they share with their parent."""

from __future__ import annotations

import gc
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk
from megalaunch.data.preprocess.encode_chunk import ChunkEncoder, Encoded, EncoderConfig
from megalaunch.data.preprocess.encoder_backend import Encode, PreloadedEncoder, make_encoder
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.preprocess.worker_process import WorkerDied, WorkerProcess, is_single_threaded

_AHEAD = 4  # chunks per worker that are being encoded or wait to be written
_SLOT_BYTES = 2  # shared bytes of tokens per byte of text; text has about one token per three bytes
_shared: list[SharedBuffers] = []  # in a worker: the buffers shared with its parent, if forked
_early: list[PreloadedEncoder] = []  # in the encoding process: the encoder loaded before it started, if any


class Workers:
    """`count` encoding processes; with one, this process encodes itself.

    Where forking is possible, `start` forks them: they inherit what this process has loaded, and share buffers with it
    that hold most chunks of `chunk_bytes`. Otherwise they are spawned immediately.
    """

    def __init__(self, count: int, chunk_bytes: int) -> None:
        self._count, self._chunk_bytes = count, chunk_bytes
        self._slots: SharedBuffers | None = None
        self._workers: list[WorkerProcess] = []
        if count > 1 and not is_single_threaded():
            self._spawn()
        self._begun: EncoderConfig | None = None
        self._waiting: deque[tuple[Chunk, int | None, Future[tuple[Encoded, list[int] | None]]]] = deque()

    def start(self, early: PreloadedEncoder | None) -> None:
        """Start the worker processes; forked workers inherit the preloaded encoder."""
        if self._count > 1 and not self._workers and not is_single_threaded():  # a thread was started meanwhile
            self._spawn()
        if self._workers:
            return
        _early[:] = [] if early is None else [early]
        if self._count > 1:
            self._slots = SharedBuffers(_AHEAD * self._count + 1, _SLOT_BYTES * self._chunk_bytes)
            self._workers = [WorkerProcess(True, _init_worker, self._slots) for _ in range(self._count)]
            _early.clear()  # the workers keep their copies

    def _spawn(self) -> None:
        self._workers = [WorkerProcess(False, int) for _ in range(self._count)]

    def prefetch(self, ahead: Iterator[Chunk], recipe: EncoderConfig) -> None:
        """Start encoding the first chunks before it is known whether `encode` will use the same recipe."""
        self._begun = recipe
        self._send(ahead, recipe, _AHEAD * len(self._workers))

    def encode(self, ahead: Iterator[Chunk], recipe: EncoderConfig) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Prefetched chunks come first; they are encoded again if the recipe differs.

        Raises:
            DataError: a worker died, or reading or encoding failed.
        """
        if not self._workers:
            encoder = ChunkEncoder(recipe, _loaded)
            for chunk in ahead:
                encoded = encoder.encode(chunk)
                encoded.cast(recipe.dtype)
                yield chunk, encoded
            return
        if recipe != self._begun:
            ahead = chain(self._requeue(), ahead)
            self._send(ahead, recipe, _AHEAD * len(self._workers))
        while self._waiting:
            chunk, slot, future = self._waiting.popleft()
            encoded, sizes = _result(future)
            self._send(ahead, recipe, 1)
            if self._slots is None or slot is None:
                yield chunk, encoded
                continue
            if sizes is not None:
                self._slots.read(slot, encoded, sizes)
            yield chunk, encoded
            self._slots.free(slot)
        self._kill()  # no more work: the processes end while the rest is written

    def _send(self, ahead: Iterator[Chunk], recipe: EncoderConfig, count: int) -> None:
        for chunk in islice(ahead, count):
            slot = None if self._slots is None else self._slots.take()
            self._waiting.append((chunk, slot, self._submit(_encode, recipe, chunk, slot)))

    def _requeue(self) -> list[Chunk]:
        """Wait for the prefetched chunks to finish, free their slots, and return the chunks."""
        begun, self._waiting = self._waiting, deque()
        for _, slot, future in begun:
            future.exception()
            if self._slots is not None and slot is not None:
                self._slots.free(slot)
        return [chunk for chunk, _, _ in begun]

    def close(self) -> None:
        """End the processes and drop their work."""
        self._kill()
        for worker in self._workers:
            worker.close()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()

    def _submit(self, function: Callable[..., Any], *words: object) -> Future[Any]:
        return min(self._workers, key=lambda worker: worker.is_busy).submit(function, *words)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except WorkerDied:
        fix = "Give fewer --workers, or free memory; --resume goes on with what was done."
        raise DataError("a worker process died, perhaps for lack of memory", fix=fix) from None


def _init_worker(slots: SharedBuffers) -> None:
    """In a forked worker: store the shared buffers."""
    gc.freeze()  # pages that the garbage collector does not visit stay shared with the parent
    _shared.append(slots)


@lru_cache(maxsize=1)
def _loaded(engine: EngineChoice, content: str) -> Encode:
    if engine is EngineChoice.GIGATOKEN and _early and _early[0].content == content:
        return _early[0].encode
    return make_encoder(engine, content)


def _encode(recipe: EncoderConfig, chunk: Chunk, slot: int | None) -> tuple[Encoded, list[int] | None]:
    """In a worker: encode a chunk. With token counts returned, the tokens of each key are in the slot."""
    encoded = _encoder(recipe).encode(chunk)
    left = None if slot is None else _shared[0].write(slot, encoded, recipe.dtype)
    if left is None:
        encoded.cast(recipe.dtype)
    return encoded, left


@lru_cache(maxsize=1)
def _encoder(recipe: EncoderConfig) -> ChunkEncoder:
    return ChunkEncoder(recipe, _loaded)


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
