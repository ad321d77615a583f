"""The checkpoints of a run: which one to load or resume from, and which ones to remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megalaunch.engine.checkpoint.coordination import rank_and_world, run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.fs import discard_directory, list_temporary_directories, remove_directory
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step, retention_reasons
from megalaunch.rundir.checkpoint.manifest import MANIFEST, verify_checkpoint
from megalaunch.rundir.checkpoint.tensor_index import TENSOR_INDEX
from megalaunch.rundir.paths import RunDirectory, checkpoint_step


def latest_valid_checkpoint(
    checkpoints: Path,
    refused: Callable[[Path, list[str]], None],
    read: Callable[[int, int], None] = lambda done, total: None,
    until: int | None = None,
) -> Path | None:
    """Return the checkpoint of the highest step in which every file has its size and SHA-256, or None. Collective.

    The files of a checkpoint are split over the ranks; all ranks get the same result. Invalid checkpoints are skipped.

    Args:
        checkpoints: the directory of a run's checkpoints.
        refused: called on rank 0 with each invalid checkpoint and its problems.
        read: progress callback: (bytes read, total bytes) of this rank.
        until: the highest step to consider; None: any.
    """

    def candidates() -> list[Path]:
        found = checkpoints_by_step(checkpoints)
        return [directory for step, directory in found.items() if until is None or step <= until]

    for directory in run_on_rank0(candidates):
        shares = run_on_all_ranks(partial(verify_checkpoint, directory, part=rank_and_world(), read=read))
        problems = list(dict.fromkeys(problem for share in shares for problem in share))
        if not problems:
            return directory
        if rank_and_world()[0] == 0:
            refused(directory, problems)
    return None


def require_never_saved(checkpoints: Path, refused: Sequence[str], last_saved: Callable[[], int | None]) -> None:
    """Raise CheckpointError if a run has saved checkpoints before, but none of them is valid or present.

    Call in one process after `latest_valid_checkpoint` returned None: training from step 0 would truncate the metrics
    and overwrite checkpoints that may be repairable.

    Args:
        checkpoints: the directory of a run's checkpoints.
        refused: the problems of each invalid checkpoint, newest first.
        last_saved: returns the step of the newest recorded save, or None.
    """
    fix = "nothing was changed; restore one from a backup, or start a new run in another run.directory"
    if refused:
        more = f", and {len(refused) - 1} older" if len(refused) > 1 else ""
        raise CheckpointError(f"no checkpoint in {checkpoints} is valid ({refused[0]}{more}); {fix}")
    step = last_saved()
    if step is not None:
        raise CheckpointError(f"{checkpoints} is empty, but the run has saved a checkpoint of step {step}; {fix}")


def prune_checkpoints(
    checkpoints: Path, keep_last: int, known_valid: Path | None = None, keep_every: int = 0
) -> list[Path]:
    """Remove old checkpoints and the temporary directories of killed saves; return the removed checkpoints.

    Call in one process while no save is in progress. The newest valid checkpoint is never removed.

    Args:
        checkpoints: the directory of a run's checkpoints.
        keep_last: number of newest checkpoints to keep; 0 keeps all.
        known_valid: a checkpoint just saved, which is not read again for validation.
        keep_every: also keep the checkpoints of every `keep_every`-th step; 0: no such steps. While they are among
            the newest, they count towards `keep_last`.
    """
    remove_leftovers(checkpoints)
    steps = checkpoints_by_step(checkpoints)
    kept = retention_reasons(steps, keep_last, keep_every)
    old = [directory for step, directory in steps.items() if step not in kept]
    newest, others = list(steps.values())[:keep_last], list(steps.values())[keep_last:]
    if old and known_valid not in newest and all(verify_checkpoint(directory) for directory in newest):
        valid = next((directory for directory in others if not verify_checkpoint(directory)), None)
        old = [directory for directory in old if directory != valid]
    for directory in old:
        remove_directory(directory)
    return old


def remove_checkpoints_after(checkpoints: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step`, as a run rewinds to it. Call in one process, with no save."""
    for saved, directory in checkpoints_by_step(checkpoints).items():
        if saved > step:
            remove_directory(directory)


def remove_leftovers(checkpoints: Path) -> None:
    """Remove the temporary directories of killed saves. Call in one process while no save is in progress."""
    for leftover in list_temporary_directories(checkpoints):
        discard_directory(leftover)


def find_checkpoint(source: Path, report: Callable[[str], None]) -> Path:
    """Return the verified checkpoint of a run directory (its newest valid one), or of a checkpoint directory.

    Args:
        source: A run directory or a checkpoint.
        report: Called with a message for each skipped checkpoint.

    Raises:
        NotADirectoryError: `source` is neither.
        CheckpointError: There is no valid checkpoint.
    """
    if (source / MANIFEST).exists() or (source / TENSOR_INDEX).exists() or checkpoint_step(source) is not None:
        problems = verify_checkpoint(source)
        if problems:
            raise CheckpointError(f"the checkpoint {source} is damaged: {'; '.join(problems)}")
        return source
    run = RunDirectory(source)
    if not run.checkpoints.is_dir() and not run.spec.is_file():
        cause = "has neither a checkpoint nor a run" if source.is_dir() else "is not a directory"
        raise NotADirectoryError(f"{source} {cause}: name a run directory or one of its checkpoints/step_<number>")
    refused: list[str] = []

    def pass_over(checkpoint: Path, problems: list[str]) -> None:
        refused.append(checkpoint.name)
        report(f"{checkpoint} is passed over: {'; '.join(problems)}")

    found = latest_valid_checkpoint(run.checkpoints, pass_over)
    if found is None:
        reason = f"all of them are damaged: {', '.join(refused)}" if refused else "the run has not saved one yet"
        raise CheckpointError(f"{run.checkpoints} has no valid checkpoint ({reason})")
    return found
