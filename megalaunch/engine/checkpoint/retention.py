"""The checkpoints of a run: which one to continue from, and which ones to remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megalaunch.engine.checkpoint import commit
from megalaunch.engine.checkpoint.coordination import rank_and_world, run_on_all_ranks, run_on_rank0
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.checkpoint.retention import retention_reasons


def latest_valid_checkpoint(
    checkpoints: Path,
    refused: Callable[[Path, list[str]], None],
    read: Callable[[int, int], None] = lambda done, total: None,
) -> Path | None:
    """The checkpoint of the highest step whose every file has its size and sha256, or None. Collective.

    The ranks share the reading, and all get the same answer. Invalid ones are passed over; `refused` is told
    of each with its problems, on rank 0; `read` hears how many of this rank's bytes are read.
    """
    for directory in run_on_rank0(lambda: list(checkpoints_by_step(checkpoints).values())):
        shares = run_on_all_ranks(partial(verify_checkpoint, directory, part=rank_and_world(), read=read))
        problems = list(dict.fromkeys(problem for share in shares for problem in share))
        if not problems:
            return directory
        if rank_and_world()[0] == 0:
            refused(directory, problems)
    return None


def require_never_saved(checkpoints: Path, refused: Sequence[str], last_saved: Callable[[], int | None]) -> None:
    """Raise CheckpointError where none of a run's checkpoints is valid, or those it has saved are gone.

    For one process, after `latest_valid_checkpoint` found none: training from step 0 would truncate the metrics
    and overwrite checkpoints that may still be repaired. `refused` says what is wrong with each, the newest first;
    `last_saved` is the step of the newest save on record.
    """
    remedy = "nothing was changed: bring one back from a copy, or start again in another run.directory"
    if refused:
        more = f", and {len(refused) - 1} older" if len(refused) > 1 else ""
        raise CheckpointError(f"no checkpoint in {checkpoints} is whole ({refused[0]}{more}); {remedy}")
    step = last_saved()
    if step is not None:
        raise CheckpointError(f"{checkpoints} is empty, and the run has saved a checkpoint of step {step}; {remedy}")


def prune_checkpoints(
    checkpoints: Path, keep_last: int, known_valid: Path | None = None, keep_every: int = 0
) -> list[Path]:
    """Remove all but the newest `keep_last` checkpoints (0: none) and what killed saves left; returns the removed.

    Those of every `keep_every`-th step (0: no such steps) stay, and count among the newest as long as they are.

    For one process, while no save is under way. The newest valid one is never removed; `known_valid` (one just
    saved) spares reading the newest again to find out whether it is.
    """
    commit.remove_stale(checkpoints)
    steps = checkpoints_by_step(checkpoints)
    kept = retention_reasons(steps, keep_last, keep_every)
    old = [directory for step, directory in steps.items() if step not in kept]
    newest, others = list(steps.values())[:keep_last], list(steps.values())[keep_last:]
    if old and known_valid not in newest and all(verify_checkpoint(directory) for directory in newest):
        valid = next((directory for directory in others if not verify_checkpoint(directory)), None)
        old = [directory for directory in old if directory != valid]
    for directory in old:
        commit.remove(directory)
    return old
