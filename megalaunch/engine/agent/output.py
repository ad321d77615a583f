"""The agent's own lines, among the output of its workers."""

from __future__ import annotations

import sys


def log(line: str) -> None:
    """Print one line to stderr."""
    print(f"megalaunch: {line}", file=sys.stderr, flush=True)
