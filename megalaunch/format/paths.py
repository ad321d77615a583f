"""Format paths for people: short, and as they would type them."""

from __future__ import annotations

from pathlib import Path


def display_path(path: Path | str) -> str:
    """Return a path relative to the working directory if it lies below it, else as it is.

    Only the names are compared: a file system that does not answer delays no message.
    """
    try:
        below = Path(path).relative_to(Path.cwd())
    except (ValueError, OSError):  # it lies elsewhere, or the working directory was removed
        return str(path)
    return str(below) if below.parts else str(path)
