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
from typing import TypeAlias, TypeVar

from megalaunch.data.errors import DataError
from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, Tokenizer, load_tokenizer, tokenizer_file
from megalaunch.data.worker_process import WorkerDied, WorkerProcess, is_single_threaded

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
R = TypeVar("R")


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


class LocalTokenizer:
    """A tokenizer of this process, loaded on first use."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load()

    @cached_property
    def _vocabulary_hash(self) -> str:
        return self._tokenizer.vocabulary_hash()

    def info(self) -> TokenizerInfo:
        """Return the tokenizer's properties. Raises DataError for files that `load_tokenizer` refuses."""
        one = self._tokenizer
        return TokenizerInfo(one.to_json(), one.vocab_size, one.eod_id, one.special_tokens_around)

    def check(self, texts: Sequence[str]) -> Checked:
        """Encode the probes and `texts`."""
        return reference_ids(self._tokenizer, texts)

    def check_and_hash(self, texts: Sequence[str]) -> Checked:
        """Encode the probes and `texts`; also hash the vocabulary, ahead of its request."""
        checked = self.check(texts)
        _ = self._vocabulary_hash
        return checked

    def vocabulary_hash(self) -> str:
        """Return `Tokenizer.vocabulary_hash`."""
        return self._vocabulary_hash


class TokenizerLoader:
    """A tokenizer that loads in another process, if this one can fork; a context manager.

    Args:
        tokenizer: loads the tokenizer.
        path: its file or directory; None: it is loaded here already, so there is no other process.
    """

    def __init__(self, tokenizer: LocalTokenizer, path: Path | None) -> None:
        self._local, self._path = tokenizer, path
        self._process: WorkerProcess[LocalTokenizer] | None = None
        self._vocabulary_hash: str | None = None
        if path is not None and is_single_threaded():
            self._process = WorkerProcess(True, _load, tokenizer)

    @classmethod
    def start(cls, path: Path, merges: Path | None = None, tiktoken: TiktokenOptions | None = None) -> TokenizerLoader:
        """Start to load a tokenizer file (see `load_tokenizer`)."""
        return cls(LocalTokenizer(lambda: load_tokenizer(path, merges, tiktoken)), path)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerLoader:
        """Return the loader of a tokenizer that is already loaded."""
        return cls(LocalTokenizer(lambda: tokenizer), None)

    def unconfirmed_content(self) -> str | None:
        """Return the file's content if it is probably the tokenizer.json of `info`, before `info` is known."""
        if self._process is None or self._path is None:
            return None
        try:
            path = tokenizer_file(self._path)
            return path.read_bytes().decode() if path.suffix == ".json" else None
        except (DataError, OSError, ValueError):  # `info` raises the error
            return None

    def info(self) -> TokenizerInfo:
        """Return the tokenizer's properties. Raises DataError for files that `load_tokenizer` refuses."""
        if self._process is None:
            return self._local.info()
        return _wait(self._process.call_deferred(LocalTokenizer.info))

    def start_check(self, texts: Sequence[str]) -> Callable[[], Checked]:
        """Start encoding the probes and `texts`; return a function that waits for the ids."""
        if self._process is None:
            return lambda: self._local.check(texts)
        result = self._process.call_deferred(LocalTokenizer.check_and_hash, texts)
        return lambda: _wait(result)

    def vocabulary_hash(self) -> str:
        """Return `Tokenizer.vocabulary_hash`."""
        if self._vocabulary_hash is not None:
            return self._vocabulary_hash
        if self._process is None:
            return self._local.vocabulary_hash()
        return _wait(self._process.call_deferred(LocalTokenizer.vocabulary_hash))

    def release(self) -> None:
        """End the process when no more texts are to be encoded; fetch the hash of the vocabulary before."""
        if self._process is not None:
            self._vocabulary_hash = self.vocabulary_hash()
            self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def __enter__(self) -> TokenizerLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _load(tokenizer: LocalTokenizer) -> LocalTokenizer:
    """In the other process: load the tokenizer ahead of the first call."""
    with suppress(Exception):  # raised again by the call that needs the tokenizer
        tokenizer.info()
    return tokenizer


def _wait(result: Callable[[], R]) -> R:
    try:
        return result()
    except WorkerDied:
        fix = "Free memory; --resume continues with the finished work."
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
