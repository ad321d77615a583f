"""Whether gigatoken can be trusted with a tokenizer: it is loaded here while `tokenizers` encodes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megalaunch.data.early_tokenizer import EarlyTokenizer
from megalaunch.data.encode_engine import Engine, engine_for, gigatoken, unlike
from megalaunch.data.encode_workers import EarlyGigatoken
from megalaunch.data.engine_check import Checked
from megalaunch.data.preprocess_settings import EngineChoice


class EngineTrial:
    """One engine, asked for, and the first `texts`; the tokenizer is that of `path`, which is `loading` elsewhere.

    Raises DataError for what `load_tokenizer` refuses, where an engine is to be tried at all.
    """

    def __init__(self, asked: EngineChoice, loading: EarlyTokenizer, path: Path, texts: Sequence[str]) -> None:
        self._asked = asked
        self._checked: Checked = []
        self._tried: str | None = None
        self._early: EarlyGigatoken | None = None
        self._why_not = ""
        if asked is EngineChoice.TOKENIZERS:
            return
        expected = loading.check(texts)
        if path.suffix == ".json":  # nearly always what the content will be known to be
            with suppress(OSError, ValueError):
                self._try(path.read_bytes().decode())
        self._checked = expected()

    def gigatoken(self, content: str) -> EarlyGigatoken | None:
        """It, where it takes the tokenizer.json `content`."""
        if self._asked is not EngineChoice.TOKENIZERS and self._tried != content:
            self._try(content)
        return self._early

    def engine(self) -> Engine:
        """What is to encode, asked for once: gigatoken is let go, as freeing it at the end of all would take longer.

        Raises DataError when it was asked for by name and cannot be used.
        """
        if self._asked is EngineChoice.TOKENIZERS:
            return Engine(self._asked)
        tried, self._early = self._early, None
        return engine_for(self._asked, self._why_not if tried is None else unlike(tried.encode, self._checked))

    def _try(self, content: str) -> None:
        found = gigatoken(content)
        self._tried, self._early = content, None
        if isinstance(found, str):
            self._why_not = found
        else:
            self._early = EarlyGigatoken(content, found)
