"""`megalaunch train --from RUN@STEP`: a new run continues with the training state of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import events_of, steps_of
from made_specs import composed
from slow_cases import slow_but
from training import tiny_overrides, train_tiny
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.branch import find_checkpoint, pin_branch
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import read_spec

SHORT = ("train.steps=4", "checkpoint.interval=2", "checkpoint.keep_last=0", "train.sample_prompt=null")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 4 steps and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("parent")
    code, out, err = train_tiny(folder, *SHORT)
    assert code == 0, out + err
    return folder


def losses(directory: RunDirectory) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_lines(directory.metrics) if "loss" in record}


def dry_run(folder: Path, parent: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", "--dry-run", *tiny_overrides(folder, *SHORT, *more, shared=parent)])
    return result.exit_code, result.output


@pytest.mark.slow
def test_a_branch_continues_as_its_parent_did_and_can_change_what_a_rerun_may_not(parent: Path, tmp_path: Path):
    run, branch = RunDirectory(parent / "run"), RunDirectory(tmp_path / "run")
    code, out, err = train_tiny(tmp_path, *SHORT, "--from", f"{run.root}@2", shared=parent)
    assert code == 0, out + err
    assert f"resuming after step 2 from {run.checkpoint(2)}" in out
    assert set(steps_of(branch)) == {3, 4}
    assert losses(branch) == {step: loss for step, loss in losses(run).items() if step > 2}  # to the bit
    assert read_spec(branch.spec).checkpoint.branch_from == str(run.checkpoint(2))

    again = train_tiny(tmp_path, *SHORT, "--from", f"{run.root}@2", "train.steps=5", shared=parent)
    assert again[0] == 0, again[1] + again[2]
    assert events_of(branch, "resumed")[-1]["checkpoint"] == str(branch.checkpoint(4))  # its own now
    code, out = dry_run(tmp_path, parent, "--from", f"{run.root}@4", "train.steps=5")
    assert code == 2
    assert "the run started with checkpoint.branch_from=" in " ".join(out.split())  # a long path wraps the lines

    changed = ("train.steps=6", "optimizer.lr=1e-4", f"run.directory={tmp_path / 'other'}")
    assert dry_run(tmp_path, parent, *changed, "--from", str(run.root))[0] == 0  # no rerun may change the peak rate


def test_a_rerun_stays_with_the_checkpoint_that_a_run_began_with(parent: Path):
    run = RunDirectory(parent / "run")
    spec = composed("recipe=tiny", "data.mock=true").spec
    named = with_values(spec, {"checkpoint.branch_from": str(run.root)})
    stored = with_values(spec, {"checkpoint.branch_from": str(run.checkpoint(2))})
    assert pin_branch(named).checkpoint.branch_from == str(run.checkpoint(4))
    assert pin_branch(named, stored).checkpoint.branch_from == str(run.checkpoint(2))
    assert pin_branch(spec) == spec
    assert find_checkpoint(str(run.checkpoint(2))) == run.checkpoint(2)


REFUSED = [
    ("{run}@3", (), "step_00000003 is not a checkpoint on this machine; {run} has those of steps 2, 4"),
    ("nowhere", (), "nowhere is not a checkpoint on this machine; "),
    (
        "{run}@4",
        (),
        "train.steps [checkpoint.branch_from] the checkpoint is that of step 4, and the run ends",
    ),
    ("{run}@2", ("checkpoint.load_pretrained={run}",), "a run begins with weights (load_pretrained) or with the"),
]


@pytest.mark.parametrize(
    ("reference", "more", "message"),
    slow_but(REFUSED, *REFUSED[:2]),
)
def test_what_cannot_be_branched_from_is_refused(
    parent: Path, tmp_path: Path, reference: str, more: tuple[str, ...], message: str
):
    run = str(parent / "run")
    filled = [text.format(run=run) for text in (*more, "--from", reference)]
    code, out = dry_run(tmp_path, parent, *filled)
    assert code == 2
    assert " ".join(message.format(run=run).split()) in " ".join(out.split())


def test_another_model_is_refused_with_its_differences(parent: Path, tmp_path: Path):
    code, out, err = train_tiny(
        tmp_path, *SHORT, "model.hidden_size=48", "--from", f"{parent / 'run'}@2", shared=parent
    )
    assert code == 4
    said = " ".join((out + err).split())
    assert "step_00000002 does not match the run: model.embedding.weight has the shape [" in said
