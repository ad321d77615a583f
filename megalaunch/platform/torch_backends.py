"""Packages that torch imports by itself (entry point `torch.backends`): a broken one makes `import torch` fail."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from megalaunch.platform.plugins import PlatformError

GROUP = "torch.backends"
# Of torch/__init__.py; before it stands the traceback of the package's own error.
_FAILED = re.compile(r"RuntimeError: Failed to load the backend extension: (.+?)\. You can disable")
_CAUSED = "The above exception was the direct cause of the following exception:"


def broken_backend(traceback: str) -> PlatformError | None:
    """Return what is wrong if a traceback ends with torch's error about a package that it imports by itself."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip()]
    failed = _FAILED.search(lines[-1]) if lines else None
    if failed is None:
        return None
    name = failed[1]
    entry = next((entry for entry in entry_points(group=GROUP) if entry.name == name), None)
    # The last cause is torch's: the package's error may have one of its own.
    causes = [index for index, line in enumerate(lines) if line == _CAUSED]
    reason = f": {lines[causes[-1] - 1]}" if causes and causes[-1] else ""
    package, installed = _distribution(name, entry)
    return PlatformError(f"{installed}, which torch imports by itself, fails{reason}", _fix(package))


def backend_that_may_crash() -> PlatformError | None:
    """Return what may be wrong if a signal ended `import torch`; None if torch imports no other package by itself."""
    found = [_distribution(entry.name, entry) for entry in entry_points(group=GROUP)]
    if not found:
        return None
    shown = ", ".join(installed for _, installed in found)
    return PlatformError(f"torch crashes when it is imported, and with it {shown}", _fix(found[0][0]))


def _distribution(name: str, entry: EntryPoint | None) -> tuple[str, str]:
    """Return the package of an entry point, and the same with its version."""
    if entry is None or entry.dist is None:
        return name, name
    return entry.dist.name, f"{entry.dist.name} {entry.dist.version}"


def _fix(package: str) -> str:
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        torch = "this torch"
    return (
        f"install the {package} that was built for {torch}, or uninstall it; the variable "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves it out"
    )
