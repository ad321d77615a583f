"""The run directory before a launch: inspect it, decide whether to start or resume, lock it, create its folders."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalaunch.format.paths import display_path
from megalaunch.fs import make_directory
from megalaunch.launch.lock import RunLock, is_locked
from megalaunch.rundir.checkpoint.contents import SPEC_FILE
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.outcome import ExitCode, Outcome, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.spec_file import read_spec

_OURS = re.compile(
    r"spec\.yaml|rendezvous\.json|overrides\.txt|metrics\.jsonl|experts\.bin|events\.jsonl|outcome\.json|sample\.txt|lock"
    r"|attempts\.jsonl|resumes\.jsonl|bad_steps\.json|job\.json|job\.sbatch|final\.sbatch|job\.yaml|host\.json|host\.lock"
    r"|logs|checkpoints|plots|profiles|tensorboard|trackers|report\.html|tokenizer\.json|origin|\.[a-z.]+\.unfinished"
)


class RunDirectoryError(Exception):
    """The directory cannot be used for this run; `fix` says what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class DirectoryState:
    """The state that earlier launches left: `stored` is the frozen spec of a run that has trained."""

    kind: Literal["new", "begun"]
    stored: RunSpec | None = None
    outcome: Outcome | None = None
    checkpoints: tuple[int, ...] = ()


def inspect_run(directory: RunDirectory) -> DirectoryState:
    """Inspect a run directory without changing it.

    A run counts as begun once it has trained: a launch that ended before the first step left nothing to protect.

    Raises:
        RunDirectoryError: the path is not a run directory, or cannot be read.
        SpecError: spec.yaml is invalid.
    """
    root = directory.root
    if not root.exists():
        return DirectoryState("new")
    if not root.is_dir():
        raise RunDirectoryError(f"{root} is not a directory", "name another run.directory")
    try:
        names = sorted(path.name for path in root.iterdir())
    except PermissionError:
        raise RunDirectoryError(f"{root} cannot be read", "name another run.directory, or ask its owner") from None
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    trained = _has_content(directory.metrics) or bool(_checkpoint_steps(directory))
    if not directory.spec.exists():
        if trained and not any(_saved_specs(directory)):
            raise RunDirectoryError(f"{root} has a run without its spec.yaml", "name another run.directory")
        if foreign and not trained:
            shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise RunDirectoryError(f"{root} is not a run directory: it contains {shown}", "name a new run.directory")
    if not trained:
        return DirectoryState("new")
    return DirectoryState(
        "begun", _stored_spec(directory), read_outcome(directory.outcome), _checkpoint_steps(directory)
    )


def _stored_spec(directory: RunDirectory) -> RunSpec:
    """Read the run's spec.yaml; if a power failure left it empty, the copy in the newest checkpoint that has one."""
    try:
        if directory.spec.read_bytes().strip(b"\0\r\n "):
            return read_spec(directory.spec)
    except FileNotFoundError:
        pass
    for path in _saved_specs(directory):
        with contextlib.suppress(SpecError):
            return read_spec(path)
    raise RunDirectoryError(f"{directory.spec} is empty, and no checkpoint has a copy", "name another run.directory")


def _saved_specs(directory: RunDirectory) -> list[Path]:
    """Return the copies of spec.yaml in checkpoints, newest first."""
    paths = (directory.checkpoint(step) / SPEC_FILE for step in reversed(_checkpoint_steps(directory)))
    return [path for path in paths if path.is_file()]


@dataclass(frozen=True)
class Decision:
    """The action of a launch, and sentences for the user about what a continued run keeps."""

    action: Literal["start", "continue", "report"]
    notes: tuple[str, ...] = ()


def decide(state: DirectoryState, spec: RunSpec) -> Decision:
    """Decide the action; raises RunDirectoryError when `run.resume` forbids it.

    Which keys a begun run may change is decided by plan.resume_compatibility.
    """
    if state.kind == "new" or state.stored is None:
        if spec.run.resume == "required":
            message = f"run.resume=required, but {display_path(str(spec.run.directory))} has no run to resume"
            raise RunDirectoryError(message, "set run.directory to that of the run, or omit run.resume")
        return Decision("start")
    if spec.run.resume == "never":
        message = f"run.resume=never, but {display_path(str(spec.run.directory))} has a run that has trained"
        raise RunDirectoryError(message, "name another run.directory, or omit run.resume to resume the run")
    last = min(spec.train.steps, spec.train.exit_at_step or spec.train.steps)
    outcome = state.outcome
    settings = spec.train.early_stopping
    stopped_early = (
        outcome is not None and outcome.details.get("early_stopped") and settings == state.stored.train.early_stopping
    )
    if outcome is not None and outcome.exit_code == ExitCode.DONE and (outcome.step >= last or stopped_early):
        return Decision("report")
    return Decision("continue", _extension_notes(state.stored, spec))


def _extension_notes(stored: RunSpec, spec: RunSpec) -> tuple[str, ...]:
    if spec.train.steps <= stored.train.steps:
        return ()
    schedules = f"learning rate schedule (schedule.decay_steps={spec.schedule.decay_steps})"
    if spec.schedule.weight_decay_grows:
        schedules += f", the weight decay (schedule.weight_decay_incr_steps={spec.schedule.weight_decay_incr_steps})"
    return (
        f"train.steps is raised from {stored.train.steps} to {spec.train.steps}; unchanged are the "
        f"{schedules} and the order of the first {spec.data.num_samples} samples; "
        "samples beyond the epochs of those are shuffled again",
    )


def lock_run(directory: RunDirectory) -> RunLock:
    """Create the directory if needed and lock it; raises RunDirectoryError or RunLocked. Release with `unlock_run`."""
    try:
        make_directory(directory.root)
        return RunLock(directory.lock)
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        fix = "name a run.directory on a disk with space" if is_full else "name another run.directory"
        message = f"{display_path(directory.root)} is not writable ({error.strerror})"
        if directory.lock.is_symlink():
            fix = "it is a symbolic link: remove it, or name another run.directory"
            message = f"{display_path(directory.lock)} cannot be written ({error.strerror})"
        raise RunDirectoryError(message, fix) from error


def unlock_run(directory: RunDirectory, lock: RunLock) -> None:
    """Release the lock, and remove the directory if it is empty."""
    lock.release()
    with contextlib.suppress(OSError):
        directory.root.rmdir()


def run_is_locked(directory: RunDirectory) -> bool:
    """Return whether a launcher holds the run directory now."""
    return is_locked(directory.lock)


def unwritable_reason(directory: RunDirectory) -> str | None:
    """Return why the run's folders cannot be written, or None; tests with empty files, so a full disk may pass."""
    for folder in (directory.root, directory.logs, directory.checkpoints):
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
            if folder == directory.root:
                os.close(os.open(directory.events, os.O_WRONLY | os.O_APPEND))
        except OSError as error:
            return f"{display_path(folder)} cannot be written: {error.strerror}"
    return None


def create_folders(directory: RunDirectory) -> None:
    """Create the folders that workers write into; remove the outcome, progress and trace files of the last launch."""
    for folder in (directory.logs, directory.checkpoints, directory.plots):
        make_directory(folder)
    for pattern in ("rank_*.progress.json", "rank_*.collectives.json"):
        for stale in directory.logs.glob(pattern):
            stale.unlink()
    directory.outcome.unlink(missing_ok=True)


def _checkpoint_steps(directory: RunDirectory) -> tuple[int, ...]:
    return tuple(sorted(checkpoints_by_step(directory.checkpoints)))


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
