"""Decide whether a launch starts a run, continues it, or only reports it: `run.resume` and the directory's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema import RunSpec
from megalaunch.launch.directory import RunDirectoryError, RunState
from megalaunch.rundir.outcome import ExitCode


@dataclass(frozen=True)
class Decision:
    """The action of a launch, and sentences for the user about what a continued run keeps."""

    action: Literal["start", "continue", "report"]
    notes: tuple[str, ...] = ()


def decide(state: RunState, spec: RunSpec) -> Decision:
    """Decide the action; raises RunDirectoryError when `run.resume` forbids it.

    Which keys a begun run may change is decided by plan.resume_compatibility.
    """
    if state.kind == "new" or state.stored is None:
        if spec.run.resume == "required":
            message = f"run.resume=required, and {spec.run.directory} holds no begun run"
            raise RunDirectoryError(message, "name the run's own run.directory, or leave run.resume out")
        return Decision("start")
    if spec.run.resume == "never":
        message = f"run.resume=never, and {spec.run.directory} holds a begun run"
        raise RunDirectoryError(message, "name another run.directory, or leave run.resume out to continue")
    last = min(spec.train.steps, spec.train.exit_at_step or spec.train.steps)
    outcome = state.outcome
    if outcome is not None and outcome.exit_code == ExitCode.DONE and outcome.step >= last:
        return Decision("report")
    return Decision("continue", _extension_notes(state.stored, spec))


def _extension_notes(stored: RunSpec, spec: RunSpec) -> tuple[str, ...]:
    if spec.train.steps <= stored.train.steps:
        return ()
    return (
        f"train.steps raised from {stored.train.steps} to {spec.train.steps}: what stays as when the run began is the "
        f"learning-rate horizon (schedule.decay_steps={spec.schedule.decay_steps}) and the order of the first "
        f"{spec.data.num_samples} samples; later samples are further epochs with their own shuffle",
    )
