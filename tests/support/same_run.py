"""Comparing a run that something happened to with the one that nothing happened to."""

from __future__ import annotations

from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

SAME = ("step", "loss", "grad_norm", "learning_rate", "tokens", "validation_loss")


def differences(directory: RunDirectory, undisturbed: RunDirectory, step: int) -> list[str]:
    """What differs in metrics, line by line, and in the weights and moments of a step, bit for bit."""
    runs = (directory, undisturbed)
    mine, theirs = ([{key: line.get(key) for key in SAME} for line in read_lines(run.metrics)] for run in runs)
    found = []
    if mine != theirs:
        first = next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), None)
        found.append(f"{len(mine)} lines of metrics, {len(theirs)} in the undisturbed run; first difference: {first}")
    ours, reference = (dict(read_tensors(run.checkpoint(step))) for run in runs)
    if ours.keys() != reference.keys():
        return [*found, f"other tensors: {sorted(ours.keys() ^ reference.keys())}"]
    return found + [f"other values of {name}" for name in reference if not ours[name].equal(reference[name])]
