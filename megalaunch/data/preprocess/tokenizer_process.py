"""The tokenizer, loaded by a process of its own while this one imports and loads what else it needs.

Libraries of tokenizers load under Python's lock, so that a thread would not do.
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
    """What preprocessing must know of a tokenizer; `content` is that of a tokenizer.json of it.

    `around` is what its post-processor puts around every text (see `Tokenizer.special_tokens_around`).
    """

    content: str
    vocab_size: int
    eod_id: int | None
    around: SpecialTokens | None = SpecialTokens()


class TokenizerProcess:
    """A tokenizer that is loaded from the beginning on, used in a `with`.

    It is loaded here, when it is asked for, where another process could not be forked.
    """

    def __init__(self, path: Path, merges: Path | None, tiktoken: TiktokenOptions | None = None) -> None:
        self._here = _LazyTokenizer(path, merges, tiktoken)
        self._process = WorkerProcess(True, _load_there, self._here) if is_single_threaded() else None

    def known(self) -> TokenizerInfo:
        """What is to be known of it. Raises DataError for what `load_tokenizer` refuses."""
        if self._process is None:
            return self._here.known
        known: TokenizerInfo = _answer(self._process.call_deferred(_known_there))
        return known

    def check(self, texts: Sequence[str]) -> Callable[[], Checked]:
        """Begin to encode probes and `texts` (see backend_check.py); what is given back waits for the ids."""
        if self._process is None:
            return lambda: self._here.check(texts)
        answer = self._process.call_deferred(_check_there, texts)
        return lambda: _answer(answer)

    def vocabulary_hash(self) -> str:
        """That of `Tokenizer`; who asks for it last finds it computed."""
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
    """A tokenizer that is loaded when it is needed first."""

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


_there: list[_LazyTokenizer] = []  # in the other process: what it loads


def _load_there(loading: _LazyTokenizer) -> None:
    _there.append(loading)
    with suppress(Exception):  # whatever it is, it is raised again for who asks
        _ = loading.known


def _known_there() -> TokenizerInfo:
    return _there[0].known


def _check_there(texts: Sequence[str]) -> Checked:
    checked = _there[0].check(texts)
    _ = _there[0].vocabulary_hash  # kept until it is asked for
    return checked


def _hash_there() -> str:
    return _there[0].vocabulary_hash


def _answer(answer: Callable[[], Any]) -> Any:
    try:
        return answer()
    except WorkerDied:
        fix = "Free memory; --resume goes on with what was done."
        raise DataError("the process that loads the tokenizer died, perhaps for lack of memory", fix=fix) from None
