"""Splits texts into sentences for `--split-sentences`, as Megatron does: with NLTK's Punkt models."""

from __future__ import annotations

from collections.abc import Callable

from megalaunch.data.errors import DataError

_PIECE = 1_000_000  # characters split at a time, as in Megatron


def make_splitter(language: str) -> Callable[[str], list[str]]:
    """Return a function that splits a text into its sentences.

    The model is read from NLTK's `punkt_tab` tables (plain text; the older pickled models are never read).

    Raises:
        DataError: the package nltk or the model is missing.
    """
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ImportError:
        raise DataError("splitting sentences needs the package nltk", fix="pip install nltk brings it.") from None
    try:
        punkt = PunktTokenizer(language)
    except LookupError:
        raise DataError(
            f"NLTK has no Punkt tables for {language}",
            fix="Put punkt_tab into a folder that the variable NLTK_DATA names (python -m nltk.downloader punkt_tab).",
        ) from None

    def split(text: str) -> list[str]:
        pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
        return [sentence for piece in pieces for sentence in punkt.tokenize(piece)]

    return split
