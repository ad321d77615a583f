"""Decides whether gigatoken can be used: loads it in this process while another encodes with `tokenizers`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalaunch.data.preprocess.backend_check import Checked
from megalaunch.data.preprocess.encoder_backend import EncoderBackend, find_mismatch, gigatoken, resolve_backend
from megalaunch.data.preprocess.encoder_pool import PreloadedEncoder
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.preprocess.tokenizer_process import TokenizerProcess


class BackendTrial:
    """Trial of the requested backend on the first `texts`; `loading` loads the tokenizer of `path` in another process.

    Raises DataError for files that `load_tokenizer` refuses, if there is a backend to be tried.
    """

    def __init__(self, asked: EngineChoice, loading: TokenizerProcess, path: Path, texts: Sequence[str]) -> None:
        self._asked = asked
        self._checked: Checked = []
        self._tried: str | None = None
        self._early: PreloadedEncoder | None = None
        self._why_not = ""
        if asked is EngineChoice.TOKENIZERS:
            return
        expected = loading.check(texts)
        if path.suffix == ".json":  # nearly always a tokenizer.json, so start before it is confirmed
            with suppress(OSError, ValueError):
                self._try(path.read_bytes().decode())
        self._checked = expected()

    def gigatoken(self, content: str) -> PreloadedEncoder | None:
        """Return gigatoken's encoder, if gigatoken supports the tokenizer.json `content`."""
        if self._asked is not EngineChoice.TOKENIZERS and self._tried != content:
            self._try(content)
        return self._early

    def backend(self) -> EncoderBackend:
        """Return the selected backend (call once) and drop the gigatoken instance; freeing it at exit is slower.

        Raises:
            DataError: gigatoken was requested by name and cannot be used.
        """
        if self._asked is EngineChoice.TOKENIZERS:
            return EncoderBackend(self._asked)
        tried, self._early = self._early, None
        return resolve_backend(
            self._asked, self._why_not if tried is None else find_mismatch(tried.encode, self._checked)
        )

    def _try(self, content: str) -> None:
        found = gigatoken(content)
        self._tried, self._early = content, None
        if isinstance(found, str):
            self._why_not = found
        else:
            self._early = PreloadedEncoder(content, found)
