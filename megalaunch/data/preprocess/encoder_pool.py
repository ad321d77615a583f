"""The processes that encode, and what they are asked."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk
from megalaunch.data.preprocess.encode_chunk import ChunkEncoder, Encoded, EncoderConfig
from megalaunch.data.preprocess.encoder_backend import Encode, make_encoder
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.preprocess.shared_buffers import SharedBuffers
from megalaunch.data.preprocess.worker_process import WorkerDied, WorkerProcess, is_single_threaded

_AHEAD = 4  # chunks a worker that are under way or wait to be written
_SLOT_BYTES = 2  # bytes of tokens a byte of text for which memory is shared; text has about one token a three bytes
_shared: list[SharedBuffers] = []  # of a worker: the memory that it shares with its parent, if it does
_early: list[PreloadedEncoder] = []  # of who encodes, a worker or not: what was loaded before it began, if anything was


@dataclass(frozen=True)
class PreloadedEncoder:
    """What encodes as the tokenizer.json `content` says."""

    content: str
    encode: Encode


class Workers:
    """`count` processes that encode; with one, this process does it itself.

    Where they can be forked, `start` does so: they have what this process loaded, and share memory with it, enough for
    most chunks of `chunk_bytes`. Else they are spawned at once.
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
        """Have all processes there, with what was loaded here where they can have it."""
        if self._count > 1 and not self._workers and not is_single_threaded():  # it no longer is
            self._spawn()
        if self._workers:
            return
        _early[:] = [] if early is None else [early]
        if self._count > 1:
            self._slots = SharedBuffers(_AHEAD * self._count + 1, _SLOT_BYTES * self._chunk_bytes)
            self._workers = [WorkerProcess(True, _init_worker, self._slots) for _ in range(self._count)]
            _early.clear()  # theirs it stays

    def _spawn(self) -> None:
        self._workers = [WorkerProcess(False, int) for _ in range(self._count)]

    def prefetch(self, ahead: Iterator[Chunk], recipe: EncoderConfig) -> None:
        """Have the first chunks encoded before it is known whether they will be asked for with this recipe."""
        self._begun = recipe
        self._send(ahead, recipe, _AHEAD * len(self._workers))

    def encode(self, ahead: Iterator[Chunk], recipe: EncoderConfig) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Those that were begun come first. Raises DataError for a worker that dies, and what reading or encoding raises.
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
        self._kill()  # there is no more to do: they end while the rest is written

    def _send(self, ahead: Iterator[Chunk], recipe: EncoderConfig, count: int) -> None:
        for chunk in islice(ahead, count):
            slot = None if self._slots is None else self._slots.take()
            self._waiting.append((chunk, slot, self._submit(_encode, recipe, chunk, slot)))

    def _requeue(self) -> list[Chunk]:
        """The chunks that were begun, once no worker is at them any more."""
        begun, self._waiting = self._waiting, deque()
        for _, slot, future in begun:
            future.exception()
            if self._slots is not None and slot is not None:
                self._slots.free(slot)
        return [chunk for chunk, _, _ in begun]

    def close(self) -> None:
        """End the processes; what they were to do is dropped."""
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
    """In a forked worker: take over what it has from its parent."""
    gc.freeze()  # what is never looked through for garbage stays shared
    _shared.append(slots)


@lru_cache(maxsize=1)
def _loaded(engine: EngineChoice, content: str) -> Encode:
    if engine is EngineChoice.GIGATOKEN and _early and _early[0].content == content:
        return _early[0].encode
    return make_encoder(engine, content)


def _encode(recipe: EncoderConfig, chunk: Chunk, slot: int | None) -> tuple[Encoded, list[int] | None]:
    """In a worker: a chunk's documents; with numbers, their tokens lie in the slot, so many of each key."""
    encoded = _encoder(recipe).encode(chunk)
    left = None if slot is None else _shared[0].write(slot, encoded, recipe.dtype)
    if left is None:
        encoded.cast(recipe.dtype)
    return encoded, left


@lru_cache(maxsize=1)
def _encoder(recipe: EncoderConfig) -> ChunkEncoder:
    return ChunkEncoder(recipe, _loaded)
