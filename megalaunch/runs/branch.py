"""The checkpoint with which a run branches off another run (`checkpoint.branch_from`): find it, pin it, check it."""

from __future__ import annotations

import re
from pathlib import Path

from megalaunch.plan.findings import Finding
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.checkpoint.manifest import MANIFEST
from megalaunch.rundir.paths import RunDirectory, checkpoint_step
from megalaunch.schema import RunSpec, with_values

KEY = "checkpoint.branch_from"
_AT_STEP = re.compile(r"(?P<run>.+)@(?P<step>\d+)")


def pin_branch(spec: RunSpec, stored: RunSpec | None = None) -> RunSpec:
    """Replace RUN@STEP or RUN by the absolute path of the checkpoint; a reference that names none stays as it is.

    Args:
        spec: The resolved spec.
        stored: That of a begun run: it stays at the checkpoint with which it began, though RUN may have newer ones.
    """
    reference = spec.checkpoint.branch_from
    if reference is None:
        return spec
    pinned = stored.checkpoint.branch_from if stored is not None else None
    if pinned is not None and Path(pinned).parent.parent == _absolute(reference):
        return with_values(spec, {KEY: pinned})
    found = find_checkpoint(reference)
    return spec if found is None else with_values(spec, {KEY: str(found)})


def find_checkpoint(reference: str) -> Path | None:
    """Return the checkpoint that RUN@STEP, RUN (its newest) or a path names; None if there is none.

    The path of RUN@STEP is returned whether or not it exists.
    """
    at_step = _AT_STEP.fullmatch(reference)
    if at_step is not None:
        return RunDirectory(_absolute(at_step["run"])).checkpoint(int(at_step["step"]))
    path = _absolute(reference)
    if (path / MANIFEST).is_file():
        return path
    return max(_checkpoints(path), default=None)


def check_branch(spec: RunSpec, begun: bool) -> list[Finding]:
    """Return an error if the run cannot begin with the checkpoint that it names.

    Args:
        spec: The spec, with a pinned checkpoint.
        begun: The run has a checkpoint of its own, so that the other one is no longer needed.
    """
    reference = spec.checkpoint.branch_from
    if reference is None or begun:
        return []
    checkpoint = Path(reference)
    step = checkpoint_step(checkpoint)
    if not (checkpoint / MANIFEST).is_file():
        run = checkpoint.parent.parent if step is not None else _absolute(reference)
        there = ", ".join(str(checkpoint_step(path)) for path in sorted(_checkpoints(run)))
        hint = f"; {run} has those of steps {there}" if there else f"; {run} has none"
        message = f"{reference} is not a checkpoint on this machine{hint}"
        return [Finding("checkpoint.branch_from", "error", KEY, message)]
    if step is not None and spec.train.steps <= step:
        message = f"the checkpoint is that of step {step}, and the run ends at step {spec.train.steps}"
        return [Finding("checkpoint.branch_from", "error", "train.steps", message, {"step": step})]
    return []


def _checkpoints(run: Path) -> list[Path]:
    found = checkpoints_by_step(RunDirectory(run).checkpoints).values()
    return [path for path in found if (path / MANIFEST).is_file()]


def _absolute(path: str) -> Path:
    return Path.cwd() / Path(path).expanduser()
