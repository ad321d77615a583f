"""Parsers of the paths that name token files and tokenizers: a folder alone names none, and is refused."""

from __future__ import annotations

from pathlib import Path

import typer

_PREFIX = "prefix such as FOLDER/tokens"


def file_prefix(text: str) -> Path:
    """Return the prefix of token files; typer.BadParameter if it is a folder."""
    return _named(text, _PREFIX)


def output_prefix(text: str) -> Path:
    """Return the prefix of token files to write, which are memory-mapped later and therefore never at a URL.

    Raises:
        typer.BadParameter: the text is a folder, or a URL, which as a path would name a local folder `s3:`. It is not
            shown, as it may hold a credential.
    """
    scheme, found, _ = text.partition("://")
    if found:
        fix = "Give a path of this machine or of a mounted store, and copy the finished files."
        raise typer.BadParameter(f"token files are not written to {scheme}:// URLs. {fix}")
    return _named(text, _PREFIX)


def tokenizer_output(text: str) -> Path:
    """Return the path of a tokenizer to write; typer.BadParameter if it is a folder."""
    example = "file such as FOLDER/tokenizer.json"
    path = _named(text, example).expanduser()
    if path.is_dir():
        raise _folder(text, example)
    return path


def _named(text: str, example: str) -> Path:
    if text.rpartition("/")[2] in ("", ".", ".."):  # unlike Path.name, it is empty after a last slash
        raise _folder(text, example)
    return Path(text)


def _folder(text: str, example: str) -> typer.BadParameter:
    return typer.BadParameter(f"{text or 'an empty name'} is a folder; give a {example}")
