"""`--output-prefix`: the path of token files to write, which are memory-mapped later and therefore never at a URL."""

from __future__ import annotations

from pathlib import Path

import typer


def local_prefix(text: str | Path) -> Path:
    """Return the path of a text.

    Raises:
        typer.BadParameter: the text is a URL, which as a path would name a local folder `s3:`. It is not shown, as it
            may hold a credential.
    """
    scheme, found, _ = str(text).partition("://")
    if found:
        fix = "Give a path of this machine or of a mounted store, and copy the finished files."
        raise typer.BadParameter(f"token files are not written to {scheme}:// URLs. {fix}")
    return Path(text)
