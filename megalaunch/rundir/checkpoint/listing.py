"""The checkpoints of a run as a list: which there are, how big, whether whole, and what cut-off saves left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.paths import checkpoint_step

UNFINISHED = ".unfinished-"  # before the name of a checkpoint while it is written


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint: its bytes on disk, when it was finished (seconds since 1970), what is wrong with it."""

    path: Path
    step: int
    size: int
    saved: float
    problems: tuple[str, ...]


def checkpoints_by_step(folder: Path) -> Mapping[int, Path]:
    """The directories that have a checkpoint's name, by step, the newest first."""
    if not folder.is_dir():
        return {}
    found = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return dict(sorted(found, reverse=True))


def checkpoint_info(path: Path) -> CheckpointInfo:
    """What can be told of a checkpoint without reading its tensors. Raises OSError."""
    return CheckpointInfo(
        path,
        checkpoint_step(path) or 0,
        directory_size(path),
        path.stat().st_mtime,
        tuple(verify_checkpoint(path, hashes=False)),
    )


def leftovers(folder: Path) -> list[Path]:
    """Saves that are under way or were cut off."""
    return sorted(folder.glob(f"{UNFINISHED}*"))


def directory_size(directory: Path) -> int:
    """Size of the files directly inside a directory."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())
