"""The processes that encode: they start at once, and load the tokenizer when there is something to encode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from megalaunch.data.encode_engine import Encode, encoder_of, gigatoken_ids
from megalaunch.data.encode_records import ChunkEncoder, Encoded, Recipe
from megalaunch.data.errors import DataError
from megalaunch.data.input_chunks import Chunk
from megalaunch.data.preprocess_settings import EngineChoice
from megalaunch.data.worker_process import WorkerDied, WorkerProcess

_AHEAD = 4  # chunks a worker that are under way or wait to be written


class Workers:
    """`count` processes that encode; with one, this process does it itself.

    They begin to load `tokenizer`, the file that was asked for, before it is known what will be encoded.
    """

    def __init__(self, count: int, engine: EngineChoice, tokenizer: Path) -> None:
        self._workers = [WorkerProcess(_load, engine, tokenizer) for _ in range(count)] if count > 1 else []

    def start_gigatoken(self, tokenizer: Path, texts: list[str]) -> Callable[[], list[NDArray[Any]] | str]:
        """Have a worker encode texts with gigatoken; what is given back waits for the ids, or for why it cannot."""
        if not self._workers:
            return lambda: _gigatoken_ids(tokenizer, texts)
        future = self._submit(_gigatoken_ids, tokenizer, texts)
        return lambda: _result(future)

    def encoded(self, ahead: Iterator[Chunk], recipe: Recipe) -> Iterator[tuple[Chunk, Encoded]]:
        """Every chunk with its documents, in order; at most a few chunks are in memory at a time.

        Raises DataError for a worker that dies, and what reading or encoding raises.
        """
        if not self._workers:
            encoder = ChunkEncoder(recipe)
            yield from ((chunk, encoder.encode(chunk)) for chunk in ahead)
            return
        waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
        for chunk in islice(ahead, _AHEAD * len(self._workers)):
            waiting.append((chunk, self._submit(_encode, recipe, chunk)))
        while waiting:
            chunk, future = waiting.popleft()
            encoded: Encoded = _result(future)
            for following in islice(ahead, 1):
                waiting.append((following, self._submit(_encode, recipe, following)))
            yield chunk, encoded

    def close(self) -> None:
        """End the processes; what they were to do is dropped."""
        for worker in self._workers:
            worker.close()

    def _submit(self, function: Callable[..., Any], *words: object) -> Future[Any]:
        return min(self._workers, key=lambda worker: worker.asked).submit(function, *words)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except WorkerDied:
        fix = "Give fewer --workers, or free memory; --resume goes on with what was done."
        raise DataError("a worker process died, perhaps for lack of memory", fix=fix) from None


def _load(engine: EngineChoice, tokenizer: Path) -> None:
    """Load what takes time to load, before it is asked for."""
    if engine is not EngineChoice.TOKENIZERS and tokenizer.suffix == ".json":
        with suppress(OSError, ValueError):
            gigatoken_ids(tokenizer.read_text(encoding="utf-8"), [], _loaded)


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
