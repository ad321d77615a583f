"""Encoder backends: `tokenizers`, or gigatoken if it gives the same ids many times faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.gigatoken_encoder import GigatokenEncoder
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.preprocess.tokenizer_loader import Checked, TokenizerLoader, reference_ids
from megalaunch.data.tokenizer.tokenizer import Tokenizer, tokenizer_from_json
from megalaunch.installation import install_command

Encode: TypeAlias = Callable[[str], NDArray[Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class EncoderBackend:
    """The selected backend, and why not the faster one (empty if it is the faster one or was requested)."""

    name: EngineChoice
    note: str = ""


@dataclass(frozen=True)
class PreloadedEncoder:
    """A loaded encoder for the tokenizer.json `content`."""

    content: str
    encode: Encode


def select_backend(requested: EngineChoice, tokenizer: Tokenizer, texts: Sequence[str]) -> EncoderBackend:
    """Select gigatoken if it is installed, loads the tokenizer and gives the ids of `tokenizers`, else `tokenizers`.

    The ids are compared for probes and for `texts`.

    Raises:
        DataError: gigatoken was requested by name and cannot be used.
    """
    if requested is EngineChoice.TOKENIZERS:
        return EncoderBackend(requested)
    encode = gigatoken(tokenizer.to_json())
    return resolve_backend(
        requested, encode if isinstance(encode, str) else find_mismatch(encode, reference_ids(tokenizer, texts))
    )


def resolve_backend(requested: EngineChoice, why_not: str) -> EncoderBackend:
    """Return gigatoken, or tokenizers if there is a reason `why_not`; DataError if gigatoken was requested by name."""
    if not why_not:
        return EncoderBackend(EngineChoice.GIGATOKEN)
    if requested is EngineChoice.GIGATOKEN:
        raise DataError(f"gigatoken cannot encode this: {why_not}", fix="Give --engine auto or tokenizers.")
    return EncoderBackend(
        EngineChoice.TOKENIZERS, f"encoding with tokenizers, which takes about 40 times the CPU time: {why_not}"
    )


def gigatoken(content: str) -> Encode | str:
    """Return gigatoken's encoding function for a tokenizer.json's content, or the reason why there is none."""
    return _try_or_reason(lambda: make_encoder(EngineChoice.GIGATOKEN, content))


def find_mismatch(encode: Encode, checked: Checked) -> str:
    """Return a message for the first text whose ids differ from the reference; empty if all are equal."""
    found = _try_or_reason(lambda: [encode(text) for text, _ in checked])
    if isinstance(found, str):
        return found
    for (text, ours), theirs in zip(checked, found, strict=True):
        if not np.array_equal(np.array(ours, np.int64), theirs.astype(np.int64)):
            return f"gigatoken gives other ids for {text[:40]!r}"
    return ""


def _try_or_reason(function: Callable[[], T]) -> T | str:
    try:
        return function()
    except ImportError:
        return f"gigatoken is not installed ({install_command('megalaunch[data]')} brings it)"
    except BaseException as error:  # panics of its Rust code are a class derived from BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"gigatoken does not take this tokenizer ({_first_line(error)})"


def make_encoder(name: EngineChoice, content: str) -> Encode:
    """Return a backend's encoding function for the tokenizer.json `content`.

    It encodes one text per call on one thread: the worker processes provide the parallelism. Raises ImportError
    without the package; gigatoken's own exceptions for unsupported tokenizers are passed on.
    """
    if name is EngineChoice.GIGATOKEN:
        return GigatokenEncoder(content)
    tokenizer = tokenizer_from_json(content)
    return lambda text: np.array(tokenizer.encode_batch([text])[0], dtype=np.uint32)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class BackendTrial:
    """Trial of the requested backend on the first `texts`: `tokenizers` encodes them while gigatoken loads here.

    Raises DataError for files that `load_tokenizer` refuses, if there is a backend to be tried.
    """

    def __init__(self, requested: EngineChoice, loader: TokenizerLoader, texts: Sequence[str]) -> None:
        self._requested = requested
        self._checked: Checked = []
        self._tried: str | None = None
        self._preloaded: PreloadedEncoder | None = None
        self._why_not = ""
        if requested is EngineChoice.TOKENIZERS:
            return
        expected = loader.start_check(texts)
        content = loader.unconfirmed_content()
        if content is not None:
            self._try(content)
        self._checked = expected()

    def gigatoken(self, content: str) -> PreloadedEncoder | None:
        """Return gigatoken's encoder, if gigatoken supports the tokenizer.json `content`."""
        if self._requested is not EngineChoice.TOKENIZERS and self._tried != content:
            self._try(content)
        return self._preloaded

    def backend(self) -> EncoderBackend:
        """Return the selected backend (call once) and drop the gigatoken instance; freeing it at exit is slower.

        Raises:
            DataError: gigatoken was requested by name and cannot be used.
        """
        if self._requested is EngineChoice.TOKENIZERS:
            return EncoderBackend(self._requested)
        tried, self._preloaded = self._preloaded, None
        why_not = self._why_not if tried is None else find_mismatch(tried.encode, self._checked)
        return resolve_backend(self._requested, why_not)

    def _try(self, content: str) -> None:
        found = gigatoken(content)
        self._tried, self._preloaded = content, None
        if isinstance(found, str):
            self._why_not = found
        else:
            self._preloaded = PreloadedEncoder(content, found)
