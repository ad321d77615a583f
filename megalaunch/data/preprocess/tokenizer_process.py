"""Loads the tokenizer in another process while this one imports and loads other things.

Tokenizer libraries hold Python's GIL while loading, so a thread would not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.backend_check import Checked, reference_ids
from megalaunch.data.preprocess.settings import TiktokenOptions
from megalaunch.data.preprocess.worker_process import WorkerDied, WorkerProcess, is_single_threaded
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TokenizerInfo:
    """The properties of a tokenizer that preprocessing needs.

    Attributes:
        content: its tokenizer.json.
        vocab_size: size of the vocabulary.
        eod_id: id of the end-of-document token; None if there is none.
        around: special tokens added to every text (see `Tokenizer.special_tokens_around`).
    """

    content: str
    vocab_size: int
    eod_id: int | None
    around: SpecialTokens | None = SpecialTokens()


class TokenizerProcess:
    """A tokenizer that starts loading on construction; a context manager.

    If this process cannot fork, the tokenizer is loaded here on first use.
    """

    def __init__(self, path: Path, merges: Path | None, tiktoken: TiktokenOptions | None = None) -> None:
        self._here = _LazyTokenizer(path, merges, tiktoken)
        self._process = WorkerProcess(True, _load_there, self._here) if is_single_threaded() else None

    def known(self) -> TokenizerInfo:
        """Return the tokenizer's properties. Raises DataError for files that `load_tokenizer` refuses."""
        if self._process is None:
            return self._here.known
        known: TokenizerInfo = _answer(self._process.call_deferred(_known_there))
        return known

    def check(self, texts: Sequence[str]) -> Callable[[], Checked]:
        """Start encoding the probes and `texts` (see backend_check.py); return a function that waits for the ids."""
        if self._process is None:
            return lambda: self._here.check(texts)
        answer = self._process.call_deferred(_check_there, texts)
        return lambda: _answer(answer)

    def vocabulary_hash(self) -> str:
        """Return `Tokenizer.vocabulary_hash`; called last, it is already computed."""
        if self._process is None:
            return self._here.vocabulary_hash
        computed: str = _answer(self._process.call_deferred(_hash_there))
        return computed

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()

    def __enter__(self) -> TokenizerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LazyTokenizer:
    """A tokenizer that is loaded on first use."""

    def __init__(self, path: Path, merges: Path | None, tiktoken: TiktokenOptions | None) -> None:
        self._path, self._merges, self._tiktoken = path, merges, tiktoken

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._path, self._merges, self._tiktoken)

    @cached_property
    def known(self) -> TokenizerInfo:
        one = self._tokenizer
        return TokenizerInfo(one.to_json(), one.vocab_size, one.eod_id, one.special_tokens_around)

    @cached_property
    def vocabulary_hash(self) -> str:
        return self._tokenizer.vocabulary_hash()

    def check(self, texts: Sequence[str]) -> Checked:
        return reference_ids(self._tokenizer, texts)


_there: list[_LazyTokenizer] = []  # in the other process: its tokenizer


def _load_there(loading: _LazyTokenizer) -> None:
    _there.append(loading)
    with suppress(Exception):  # raised again by the call that needs the tokenizer
        _ = loading.known


def _known_there() -> TokenizerInfo:
    return _there[0].known


def _check_there(texts: Sequence[str]) -> Checked:
    checked = _there[0].check(texts)
    _ = _there[0].vocabulary_hash  # cached until it is requested
    return checked


def _hash_there() -> str:
    return _there[0].vocabulary_hash


def _answer(answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except WorkerDied:
        fix = "Free memory; --resume goes on with what was done."
        raise DataError("the process that loads the tokenizer died, perhaps for lack of memory", fix=fix) from None
