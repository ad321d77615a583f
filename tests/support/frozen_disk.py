"""A file system of its own whose writes block in the kernel while it is frozen."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def loop_mounted(image: Path, place: Path) -> Iterator[None]:
    """An ext4 file system of 256 MB at `place`; skips the test where it cannot be mounted and frozen."""
    with image.open("wb") as file:
        file.truncate(256 * 2**20)
    place.mkdir(parents=True, exist_ok=True)
    steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)])
    if os.geteuid() != 0 or not all(_works(step) for step in steps):
        pytest.skip("mounting a file system of its own needs root outside of a container")
    try:
        if not _works(["fsfreeze", "-f", str(place)]):
            pytest.skip("freezing a file system is not permitted here")
        _works(["fsfreeze", "-u", str(place)])
        yield
    finally:
        _works(["umount", "-l", str(place)])


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Writes below the mount point `place` do not return before the end."""
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], check=True)


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
