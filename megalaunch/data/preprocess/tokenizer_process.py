"""Loads the tokenizer in another process while this one imports and loads other things.

Tokenizer libraries hold Python's GIL while loading, so a thread would not overlap. The process also encodes the texts
for which two encoder backends must give the same ids before the faster one is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.worker_process import WorkerDied, WorkerProcess, is_single_threaded
from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, Tokenizer, load_tokenizer

# Characters of the first documents that both backends encode before gigatoken is used.
CHECKED_CHARACTERS = 100_000
# Texts that occur in corpora and on which tokenizers differ; the vocabulary's special tokens are also checked.
_PROBES = (
    "",
    " ",
    "\n\n  \t x\r\n",
    "I'll we'VE they're 'S",
    "1 22 333 4444 1234567890 3.14",
    "x\u00b2 \u00bd \u2167 \u0661\u0662 \u4e94 \U0001d7d8",
    "a\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126",
    "\u4e2d\u6587\u8a9e \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \ufeff\u00a0\u2028\u3000",
    "__init__(self, **kwargs)  # ----- =====\n\tif x!=y:return{}\n",
    "\x00\x07\x1b[0m \x7f",
)

Checked: TypeAlias = list[tuple[str, list[int]]]


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
        """Start encoding the probes and `texts`; return a function that waits for the ids."""
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


def reference_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Checked:
    """Return the probes and the start of `texts`, each with its ids by `tokenizers`."""
    checked = [*_PROBES, *(f"a{name}b {name}" for name in tokenizer.special_tokens()[:20])]
    left = CHECKED_CHARACTERS
    for text in texts:
        checked.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return list(zip(checked, tokenizer.encode_batch(checked), strict=True))
