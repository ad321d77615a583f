"""Free space: remove interrupted saves, older and local checkpoints, and failed runs without a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalaunch.fs import list_temporary_directories, remove_directory
from megalaunch.launch.directory import lock_run, run_is_locked, unlock_run
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step, directory_size
from megalaunch.rundir.checkpoint.local_shards import list_shards
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.catalog.local_checkpoints import local_folders
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.spec_file import read_spec


@dataclass(frozen=True)
class CleaningRules:
    """What to remove. `keep`: complete checkpoints to keep per run, the newest; at least 1.

    `keep_every`: keep those of every checkpoint.keep_every-th step too. `failed`: remove whole runs that failed
    before their first checkpoint, local ones included unless `local`. `local`: remove all checkpoints in the memory and
    on the disk of this machine, not only those that are no newer than the run directory's.
    """

    keep: int = 1
    keep_every: bool = True
    failed: bool = False
    local: bool = False


@dataclass(frozen=True)
class Removal:
    """A directory to remove, its bytes and why it is not needed."""

    path: Path
    size: int
    reason: str


@dataclass(frozen=True)
class RunCleaning:
    """The directories of one run to remove; none while the run is `running`."""

    run: RunDirectory
    removals: tuple[Removal, ...]
    running: bool = False


def plan_cleaning(runs: Sequence[RunDirectory], rules: CleaningRules) -> list[RunCleaning]:
    """Return what the rules remove from each run; changes nothing.

    A checkpoint from which another of the runs began (checkpoint.load_pretrained, checkpoint.branch_from) is kept.
    """
    specs = [_read_spec(run) for run in runs]
    beginnings = {
        Path(beginning).resolve()
        for spec in specs
        if spec is not None
        for beginning in (spec.checkpoint.load_pretrained, spec.checkpoint.branch_from)
        if beginning
    }
    cleanings = []
    for run, spec in zip(runs, specs, strict=True):
        if run_is_locked(run):
            cleanings.append(RunCleaning(run, (), running=True))
        elif rules.failed and _failed_without_checkpoint(run):
            cleanings.append(RunCleaning(run, tuple(_whole_run(run, spec, rules))))
        else:
            cleanings.append(RunCleaning(run, tuple(_removals(run, spec, rules, beginnings))))
    return cleanings


def clean_run(cleaning: RunCleaning) -> None:
    """Remove a run's planned directories while holding its lock, so that no launch starts meanwhile.

    Raises:
        RunLocked: the run was started in the meantime.
        RunDirectoryError: the run directory is not writable.
        OSError: a directory could not be removed.
    """
    lock = lock_run(cleaning.run)
    try:
        for removal in cleaning.removals:
            remove_directory(removal.path)
    finally:
        unlock_run(cleaning.run, lock)


def _whole_run(run: RunDirectory, spec: RunSpec | None, rules: CleaningRules) -> Iterator[Removal]:
    """Yield all of a failed run; nothing if it could continue from local checkpoints that are to be kept."""
    paths = [folder for _, folder in local_folders(run, spec)] if spec is not None else []
    if rules.local or not any(map(list_shards, paths)):
        for path in (*paths, run.root):
            yield Removal(path, _tree_size(path), "failed before its first checkpoint")


def _removals(
    run: RunDirectory, spec: RunSpec | None, rules: CleaningRules, beginnings: Collection[Path]
) -> Iterator[Removal]:
    for path in list_temporary_directories(run.checkpoints):
        yield Removal(path, directory_size(path), "interrupted save")
    keep_every = spec.checkpoint.keep_every if spec is not None and rules.keep_every else 0
    kept = 0
    for step, path in checkpoints_by_step(run.checkpoints).items():  # newest first
        if kept < rules.keep:
            kept += not verify_checkpoint(path, hashes=False)
        elif not (keep_every and step % keep_every == 0) and path.resolve() not in beginnings:
            newer = "a newer one is" if rules.keep == 1 else f"{rules.keep} newer ones are"
            yield Removal(path, directory_size(path), f"{newer} complete")
    if spec is not None:
        yield from _local_removals(run, spec, rules)


def _local_removals(run: RunDirectory, spec: RunSpec, rules: CleaningRules) -> Iterator[Removal]:
    """Yield the run's folders on this machine from which it would not continue, or all of them."""
    saved = checkpoints_by_step(run.checkpoints).items()
    newest = next((step for step, path in saved if not verify_checkpoint(path, hashes=False)), 0)
    for _, folder in local_folders(run, spec):
        last = max((shard.step for shard in list_shards(folder)), default=0)
        if rules.local or last <= newest:
            reason = "the run directory's are as new" if last <= newest else f"up to step {last} (--local)"
            yield Removal(folder, _tree_size(folder), f"local checkpoints: {reason}")


def _tree_size(directory: Path) -> int:
    return sum(file.lstat().st_size for file in directory.rglob("*") if file.is_file())


def _failed_without_checkpoint(run: RunDirectory) -> bool:
    outcome = read_outcome(run.outcome)
    ended_on_purpose = (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
    failed = outcome is not None and outcome.exit_code not in ended_on_purpose
    return failed and not checkpoints_by_step(run.checkpoints)


def _read_spec(run: RunDirectory) -> RunSpec | None:
    try:
        return read_spec(run.spec)
    except (SpecError, OSError):
        return None
