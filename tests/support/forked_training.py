"""The training runs of a rehearsal on ranks forked from pytest, without launcher and agents."""

from __future__ import annotations

from looped_run import run_loop

from megalaunch.rundir.outcome import Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.rehearsal.display import PhaseLine
from megalaunch.schema import RunSpec


def train_forked(spec: RunSpec, directory: RunDirectory, line: PhaseLine) -> tuple[Outcome, list[str]]:
    """Train by the real loop to the end (`phases.Train`)."""
    end = run_loop(spec, directory.root, timeout=240)  # sixteen ranks with eight virtual stages each, on two cores
    return Outcome(int(end.exit_code), end.reason, end.step), [end.reason]
