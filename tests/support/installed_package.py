"""Install a package of files and entry points into a folder that is on sys.path, as another distribution would be."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def install_package(site: Path, files: Mapping[str, str], entries: Mapping[str, Mapping[str, str]]) -> None:
    """Write the files, and the distribution `vendor` with the entry points by group."""
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    info = site / "vendor-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    rows = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in entries.items()
    ]
    (info / "entry_points.txt").write_text("".join(rows))


def forget_package() -> None:
    """Unload the modules of `vendor`, so that those of another installation are imported next."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vendor"]:
        del sys.modules[name]
