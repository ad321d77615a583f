"""The command that adds a package to the environment that megalaunch runs in: pip's, or that of what installed it.

An environment of `uv tool` or pipx is not the shell's, so that pip would install elsewhere; uv's have no pip.
"""

from __future__ import annotations

import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def install_command(requirement: str) -> str:
    """Return the shell command that installs a requirement for megalaunch.

    Args:
        requirement: Of a package: "nltk", "torch>=2.12", or "megalaunch[train]" for an extra.
    """
    quoted, environment = shlex.quote(requirement), Path(sys.prefix)
    is_extra = requirement.startswith("megalaunch[")
    if (environment / "uv-receipt.toml").is_file():
        return f"uv tool install {quoted}" if is_extra else f"uv tool install --with {quoted} megalaunch"
    if (environment / "pipx_metadata.json").is_file():
        return f"pipx install --force {quoted}" if is_extra else f"pipx inject megalaunch {quoted}"
    # Not `importlib.util.find_spec`: setuptools acts on a search for pip, and warns if distutils is loaded.
    return f"{'uv ' if PathFinder.find_spec('pip') is None else ''}pip install {quoted}"
