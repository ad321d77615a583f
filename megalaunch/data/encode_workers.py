"""The processes that encode: they start at once, and load the tokenizer when there is something to encode."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from multiprocessing import connection, parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megalaunch.data.encode_engine import Encode, encoder_of, gigatoken_ids
from megalaunch.data.encode_records import ChunkEncoder, Encoded, Recipe
from megalaunch.data.errors import DataError
from megalaunch.data.input_chunks import Chunk
from megalaunch.data.preprocess_settings import EngineChoice

_AHEAD = 4  # chunks a worker that are under way or wait to be written


class Workers:
    """`count` processes that encode; with one, this process does it itself.

    They begin to load `tokenizer`, the file that was asked for, before it is known what will be encoded.
    """

    def __init__(self, count: int, engine: EngineChoice, tokenizer: Path) -> None:
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            # Spawned, not forked: the tokenizer library may have threads of its own in this process.
            self._pool = ProcessPoolExecutor(count, _Context(), _start_worker, (engine, tokenizer))
            for _ in range(count):
                self._pool.submit(_nothing)

    def start_gigatoken(self, tokenizer: Path, texts: list[str]) -> Callable[[], list[NDArray[Any]] | str]:
        """Have a worker encode texts with gigatoken; what is given back waits for the ids, or for why it cannot."""
        if self._pool is None:
            return lambda: _gigatoken_ids(tokenizer, texts)
        future = self._submit(_gigatoken_ids, tokenizer, texts)
        return lambda: self._result(future)

    def encoded(self, ahead: Iterator[Chunk], recipe: Recipe) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Raises DataError for a worker that dies, and what reading or encoding raises.
        """
        if self._pool is None:
            encoder = ChunkEncoder(recipe)
            yield from ((chunk, encoder.encode(chunk)) for chunk in ahead)
            return
        waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in islice(ahead, _AHEAD * self._count):
            waiting.append((chunk, self._submit(_encode, recipe, chunk)))
        while waiting:
            chunk, future = waiting.popleft()
            encoded = self._result(future)
            for following in islice(ahead, 1):
                waiting.append((following, self._submit(_encode, recipe, following)))
            yield chunk, encoded

    def close(self) -> None:
        """End the processes; what they were to do is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _submit(self, function: Callable[..., Any], *words: object) -> Future[Any]:
        assert self._pool is not None, "only asked for where there are processes"
        with _deaths_named():
            return self._pool.submit(function, *words)

    def _result(self, future: Future[Any]) -> Any:
        with _deaths_named():
            return future.result()


@contextmanager
def _deaths_named() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        fix = "Give fewer --workers, or free memory; --resume goes on with what was done."
        raise DataError("a worker process died, perhaps for lack of memory", fix=fix) from None


class _Process(SpawnProcess):
    """A worker: it inherits that Ctrl-C is put off, and needs no main module.

    Without a main module it does not import the command line anew, nor the script of who uses this as a library.
    """

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        names: dict[str, Any] = vars(sys.modules["__main__"])
        kept: dict[str, Any] = {name: names[name] for name in ("__spec__", "__file__") if name in names}
        names["__spec__"] = None
        names.pop("__file__", None)
        try:
            super().start()
        finally:
            names |= kept
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Context(SpawnContext):
    """Starts such processes."""

    Process = _Process


def _start_worker(engine: EngineChoice, tokenizer: Path) -> None:
    """Make this process a worker: leave Ctrl-C to the parent, die with the parent, load what takes time to load."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if engine is not EngineChoice.TOKENIZERS and tokenizer.suffix == ".json":
        with suppress(OSError, ValueError):
            gigatoken_ids(tokenizer.read_text(encoding="utf-8"), [], _loaded)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "only worker processes run this"
    connection.wait([parent.sentinel])
    os._exit(1)


def _nothing() -> None:
    """Done by each worker first, so that all are started."""


@lru_cache(maxsize=1)
def _loaded(engine: EngineChoice, content: str) -> Encode:
    return encoder_of(engine, content)


def _gigatoken_ids(tokenizer: Path, texts: list[str]) -> list[NDArray[Any]] | str:
    return gigatoken_ids(tokenizer.read_text(encoding="utf-8"), texts, _loaded)


def _encode(recipe: Recipe, chunk: Chunk) -> Encoded:
    return _encoder(recipe).encode(chunk)


@lru_cache(maxsize=1)
def _encoder(recipe: Recipe) -> ChunkEncoder:
    return ChunkEncoder(recipe, _loaded)
