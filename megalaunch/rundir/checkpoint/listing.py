"""List the checkpoints of a run: step, size, problems, and which of them the next save keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.paths import checkpoint_step


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint: bytes on disk, time of its commit (seconds since 1970), problems."""

    path: Path
    step: int
    size: int
    saved: float
    problems: tuple[str, ...]


def checkpoints_by_step(folder: Path) -> Mapping[int, Path]:
    """Return the directories with a checkpoint's name by step, newest first."""
    if not folder.is_dir():
        return {}
    found = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path)) is not None]
    return dict(sorted(found, reverse=True))


def newest_step(folder: Path) -> int:
    """Return the highest step with a checkpoint, valid or not; 0 without one."""
    return max(checkpoints_by_step(folder), default=0)


def checkpoint_info(path: Path) -> CheckpointInfo:
    """Describe a checkpoint without reading its tensors. Raises OSError."""
    return CheckpointInfo(
        path,
        checkpoint_step(path) or 0,
        directory_size(path),
        path.stat().st_mtime,
        tuple(verify_checkpoint(path, hashes=False)),
    )


def directory_size(directory: Path) -> int:
    """Return the total size of the files directly inside a directory."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.is_file())


def retention_reasons(steps: Iterable[int], keep_last: int, keep_every: int) -> dict[int, str]:
    """Return the reason for which each step's checkpoint is kept. Steps that the next save removes have no entry.

    The newest `keep_last` are kept (0: all), and those of every `keep_every`-th step (0: no such steps).
    """
    reasons = {}
    for place, step in enumerate(sorted(steps, reverse=True)):
        if keep_last == 0:
            reasons[step] = "all are kept"
        elif keep_every and step % keep_every == 0:
            reasons[step] = f"every {keep_every} steps"
        elif place < keep_last:
            reasons[step] = "newest" if keep_last == 1 else f"one of the newest {keep_last}"
    return reasons
