"""Find the run directories below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megalaunch.rundir.paths import RunDirectory


def find_runs(folder: Path) -> Iterator[RunDirectory]:
    """Yield the run directories at or below `folder`, sorted by path.

    A run directory has a `spec.yaml`; nothing below one is searched, so a checkpoint's copy of the spec is not a run.
    Hidden folders and symbolic links are skipped. Raises OSError if `folder` itself cannot be read.
    """

    def raise_for_root(error: OSError) -> None:
        if error.filename is not None and Path(error.filename) == folder:
            raise error

    for root, folders, files in os.walk(folder, onerror=raise_for_root):
        if "spec.yaml" in files:
            folders.clear()
            yield RunDirectory(Path(root))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
