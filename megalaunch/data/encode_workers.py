"""The processes that encode: they start at once, and load the tokenizer when there is something to encode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megalaunch.data.encode_engine import Encode, encoder_of, gigatoken_ids
from megalaunch.data.encode_records import ChunkEncoder, Encoded, Recipe
from megalaunch.data.encode_slots import Slots
from megalaunch.data.errors import DataError
from megalaunch.data.input_chunks import Chunk
from megalaunch.data.preprocess_settings import EngineChoice
from megalaunch.data.worker_process import WorkerDied, WorkerProcess, is_alone

_AHEAD = 4  # chunks a worker that are under way or wait to be written
_SLOT_BYTES = 2  # bytes of tokens a byte of text for which memory is shared; text has about one token a three bytes
_shared: list[Slots] = []  # of a worker: the memory that it shares with its parent, if it does


class Workers:
    """`count` processes that encode; with one, this process does it itself.

    They begin to load `tokenizer`, the file that was asked for, before it is known what will be encoded. Where they
    can be forked they share memory with this process, enough for most chunks of `chunk_bytes`.
    """

    def __init__(self, count: int, engine: EngineChoice, tokenizer: Path, chunk_bytes: int) -> None:
        forked = count > 1 and is_alone()
        self._slots = Slots(_AHEAD * count + 1, _SLOT_BYTES * chunk_bytes) if forked else None
        words = (forked, _get_ready, engine, tokenizer, self._slots)
        self._workers = [WorkerProcess(*words) for _ in range(count)] if count > 1 else []
        self._begun: Recipe | None = None
        self._waiting: deque[tuple[Chunk, int | None, Future[tuple[Encoded, list[int] | None]]]] = deque()

    def start_gigatoken(self, tokenizer: Path, texts: list[str]) -> Callable[[], list[NDArray[Any]] | str]:
        """Have a worker encode texts with gigatoken; what is given back waits for the ids, or for why it cannot."""
        if not self._workers:
            return lambda: _gigatoken_ids(tokenizer, texts)
        future = self._submit(_gigatoken_ids, tokenizer, texts)
        return lambda: _result(future)

    def begin(self, ahead: Iterator[Chunk], recipe: Recipe) -> None:
        """Have the first chunks encoded before it is known whether they will be asked for with this recipe."""
        self._begun = recipe
        self._send(ahead, recipe, _AHEAD * len(self._workers))

    def encoded(self, ahead: Iterator[Chunk], recipe: Recipe) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Those that were begun come first. Raises DataError for a worker that dies, and what reading or encoding raises.
        """
        if not self._workers:
            encoder = ChunkEncoder(recipe, _loaded)
            yield from ((chunk, encoder.encode(chunk)) for chunk in ahead)
            return
        if recipe != self._begun:
            ahead = chain(self._taken_back(), ahead)
            self._send(ahead, recipe, _AHEAD * len(self._workers))
        while self._waiting:
            chunk, slot, future = self._waiting.popleft()
            encoded, sizes = _result(future)
            self._send(ahead, recipe, 1)
            if self._slots is None or slot is None:
                yield chunk, encoded
                continue
            if sizes is not None:
                self._slots.find(slot, encoded, sizes)
            yield chunk, encoded
            self._slots.free(slot)
        self._kill()  # there is no more to do: they end while the rest is written

    def _send(self, ahead: Iterator[Chunk], recipe: Recipe, count: int) -> None:
        for chunk in islice(ahead, count):
            slot = None if self._slots is None else self._slots.take()
            self._waiting.append((chunk, slot, self._submit(_encode, recipe, chunk, slot)))

    def _taken_back(self) -> list[Chunk]:
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
        return min(self._workers, key=lambda worker: worker.asked).submit(function, *words)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except WorkerDied:
        fix = "Give fewer --workers, or free memory; --resume goes on with what was done."
        raise DataError("a worker process died, perhaps for lack of memory", fix=fix) from None


def _get_ready(engine: EngineChoice, tokenizer: Path, slots: Slots | None) -> None:
    """In a worker: load what takes time to load, before it is asked for."""
    if slots is not None:
        _shared.append(slots)
    if engine is not EngineChoice.TOKENIZERS and tokenizer.suffix == ".json":
        with suppress(OSError, ValueError):
            gigatoken_ids(tokenizer.read_text(encoding="utf-8"), [], _loaded)


@lru_cache(maxsize=1)
def _loaded(engine: EngineChoice, content: str) -> Encode:
    return encoder_of(engine, content)


def _gigatoken_ids(tokenizer: Path, texts: list[str]) -> list[NDArray[Any]] | str:
    return gigatoken_ids(tokenizer.read_text(encoding="utf-8"), texts, _loaded)


def _encode(recipe: Recipe, chunk: Chunk, slot: int | None) -> tuple[Encoded, list[int] | None]:
    """In a worker: a chunk's documents; with numbers, their tokens lie in the slot, so many of each key."""
    encoded = _encoder(recipe).encode(chunk)
    return encoded, None if slot is None else _shared[0].leave(slot, encoded)


@lru_cache(maxsize=1)
def _encoder(recipe: Recipe) -> ChunkEncoder:
    return ChunkEncoder(recipe, _loaded)
