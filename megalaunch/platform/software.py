"""The software of a node: the code of megalaunch, Python and torch. All nodes of a run must have the same."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from megalaunch.platform.packages import installed_version

_NONE = "-"


@dataclass(frozen=True)
class Software:
    """Versions of one node; `code` is a hash of megalaunch's source files, `torch` is "-" without torch."""

    code: str
    python: str
    torch: str

    @classmethod
    def of_this_node(cls) -> Software:
        """Return the versions that this process runs."""
        return cls(_code_hash(), platform.python_version(), installed_version("torch") or _NONE)

    def differences(self, other: Software) -> list[tuple[str, str, str]]:
        """Return the name, the version here and the other version of all that differs."""
        names = ("the code of megalaunch", "Python", "torch")
        rows = zip(names, astuple(self), astuple(other), strict=True)
        return [(name, mine, theirs) for name, mine, theirs in rows if mine != theirs]


@cache
def _code_hash() -> str:
    """Hash names and contents of the package's source files, kernels included."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    paths = [
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    for path in sorted(paths):
        found.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]
