"""Loss spikes and losses that are not finite: skipped or rewound, as if their batches had been named before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from looped_run import Rank, events, metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.data.samples.sample import Sample
from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.train.bad_steps import LossHistory
from megalaunch.engine.train.forward_backward import SingleStage
from megalaunch.rundir.bad_steps import BadStepRecord, read_bad_steps
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.train import TrainSpec

BAD, STEPS, BATCH = 19, 23, 8
WATCHED = {
    "train.steps": STEPS,
    "train.validation_interval": 5,
    "train.check_for_spiky_loss": True,
    "train.spiky_loss_factor": 1.5,
    "train.rewind_batches": 3,
    "checkpoint.interval": 5,
    "checkpoint.keep_last": 0,
    "optimizer.lr": 0.02,
    "schedule.decay_steps": STEPS,
    "data.num_samples": STEPS * BATCH,
}


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), WATCHED)


def spiky(rank: Rank) -> None:
    """All samples are one easy text, but those of step BAD, of other tokens."""
    samples = rank.trainee.training
    width = len(samples[0].tokens)

    class Spiky(type(samples)):
        def __getitem__(self, index: int) -> Sample:
            if index // BATCH == BAD - 1:
                return Sample(np.random.default_rng(index).integers(20, 61, width))
            return Sample((np.arange(width) + index) % 10)

    samples.__class__ = Spiky


def tensors(root: Path) -> dict[str, torch.Tensor]:
    return dict(read_tensors(RunDirectory(root).checkpoint(STEPS)))


def assert_same(root: Path, reference: Path) -> None:
    assert metrics(root) == metrics(reference)
    ours, theirs = tensors(root), tensors(reference)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def done(spec: RunSpec, root: Path, **values: object) -> Path:
    ending = run_loop(with_values(spec, {key.replace("__", "."): value for key, value in values.items()}), root, spiky)
    assert int(ending.exit_code) == 0, ending.reason
    return root


def test_a_spike_ends_the_run_by_default(spec, tmp_path):
    ending = run_loop(spec, tmp_path, spiky)
    assert (int(ending.exit_code), ending.step) == (7, BAD - 1)
    assert f"of step {BAD} is" in ending.reason
    assert "x the median of the last 18 losses" in ending.reason
    assert not RunDirectory(tmp_path).bad_steps.exists()


@pytest.mark.slow
@pytest.mark.release  # the rewind below leaves out a batch, too
def test_a_skipped_spike_is_a_batch_left_out(spec, tmp_path):
    named = done(spec, tmp_path / "named", train__iterations_to_skip=(BAD,), train__check_for_spiky_loss=False)
    found = done(spec, tmp_path / "found", train__bad_step_action="skip")
    assert_same(found, named)
    (event,) = events(found, "bad_step")
    assert (event["step"], event["first"], event["rewound_to"], event["count"]) == (BAD, BAD, None, 1)
    assert [line["step"] for line in metrics(found) if "loss" in line] == [
        step for step in range(1, STEPS + 1) if step != BAD
    ]
    other = with_values(spec, {"parallel.dp": 1, "parallel.tp": 2, "train.bad_step_action": "skip"})
    done(other, tmp_path / "tp2")
    for ours, theirs in zip(metrics(tmp_path / "tp2"), metrics(found), strict=True):
        assert ours == {key: pytest.approx(value, rel=1e-4) for key, value in theirs.items()}


DELAYED = {"precision.compute_dtype": "fp8", "precision.emulate": True, "precision.fp8.recipe": "delayed"}


@pytest.mark.slow  # test_skip_step.py compares the histories of three steps
def test_a_skipped_spike_leaves_no_amax_behind(spec, tmp_path):
    """To the bit, and in a run that is resumed from a checkpoint right after the skipped step."""
    spec = with_values(spec, DELAYED)
    named = done(spec, tmp_path / "named", train__iterations_to_skip=(BAD,), train__check_for_spiky_loss=False)
    found = done(spec, tmp_path / "found", train__bad_step_action="skip")
    assert any(name.endswith("amax_history") for name in tensors(found))
    assert_same(found, named)
    parts = done(spec, tmp_path / "parts", train__bad_step_action="skip", train__exit_at_step=BAD)
    done(spec, parts, train__bad_step_action="skip")
    assert_same(parts, named)


def test_a_rewind_leaves_out_batches_and_is_exact_on_resume(spec, tmp_path):
    left_out = (BAD - 2, BAD - 1, BAD)
    named = done(spec, tmp_path / "named", train__iterations_to_skip=left_out, train__check_for_spiky_loss=False)
    root = tmp_path / "found"
    done(spec, root, train__bad_step_action="rewind", train__exit_at_step=21)
    (event,) = events(root, "bad_step")
    assert (event["first"], event["rewound_to"]) == (left_out[0], 15)
    (record,) = read_bad_steps(RunDirectory(root).bad_steps)
    assert record == BadStepRecord(BAD, left_out[0], event["reason"])
    done(spec, root, train__bad_step_action="rewind")
    assert_same(root, named)
    for step in (20, 21, STEPS):  # the newest checkpoints are lost: the older one leads to the same end
        for file in RunDirectory(root).checkpoint(step).iterdir():
            file.write_bytes(b"")
    done(spec, root, train__bad_step_action="rewind")
    assert_same(root, named)
    assert len(events(root, "bad_step")) == 1  # known from bad_steps.json


@pytest.mark.slow
def test_the_budget_of_bad_steps_ends_the_run(spec, tmp_path):
    ending = run_loop(with_values(spec, {"train.bad_step_action": "skip", "train.max_bad_steps": 0}), tmp_path, spiky)
    assert (int(ending.exit_code), ending.step) == (7, BAD - 1)
    assert "after 0 bad steps (train.max_bad_steps)" in ending.reason


def test_a_loss_that_is_not_finite_before_a_checkpoint_is_skipped(spec, tmp_path, monkeypatch):
    real = SingleStage.train

    def train(self, batch, *rest):
        losses = real(self, batch, *rest)
        if 3 * BATCH <= batch.indices[0].start < 4 * BATCH:
            for parameter in self.model.parameters():
                parameter.grad.mul_(float("nan"))
            return losses * float("nan")
        return losses

    monkeypatch.setattr(SingleStage, "train", train)
    small = with_values(spec, {"train.steps": 6, "train.bad_step_action": "rewind"})
    assert int(run_loop(small, tmp_path).exit_code) == 0
    (event,) = events(tmp_path, "bad_step")
    assert (event["step"], event["first"], event["rewound_to"]) == (4, 4, None)
    assert "the loss of step 4 is not finite on rank 0" in event["reason"]
    assert [line["step"] for line in metrics(tmp_path) if "loss" in line] == [1, 2, 3, 5, 6]
    assert all(
        torch.isfinite(tensor).all() for tensor in dict(read_tensors(RunDirectory(tmp_path).checkpoint(6))).values()
    )


@pytest.mark.parametrize("transient", slow_but([False, True], True))
def test_a_bad_step_is_computed_again(spec, tmp_path, monkeypatch, transient):
    real, calls = SingleStage.train, []

    def train(self, batch, *rest):
        losses = real(self, batch, *rest)
        if batch.indices[0].start == 3 * BATCH:  # of rank 0
            calls.append(batch)
            return losses if transient and len(calls) > 1 else losses * float("nan")
        return losses

    monkeypatch.setattr(SingleStage, "train", train)
    ending = run_loop(with_values(spec, {"train.steps": 5, "train.rerun_mode": "validate_results"}), tmp_path)
    assert (int(ending.exit_code), ending.step) == (7, 3)
    said = "the losses of rank 0 (dp0) on" if transient else "all losses are the same"
    assert f"; computed again, {said}" in ending.reason


def test_few_losses_are_no_history():
    history = LossHistory(TrainSpec(steps=1, check_for_spiky_loss=True))
    for _ in range(15):
        history.append(1.0)
    assert history.describe_spike(100.0) is None
    history.append(1.0)
    assert history.describe_spike(2.0) is None
    assert history.describe_spike(2.01) == "is 2.0 x the median of the last 16 losses, 1"


def test_damaged_bad_steps_are_refused(tmp_path):
    path = tmp_path / "bad_steps.json"
    path.write_text('{"bad_steps": [{"step": 1}]}')
    with pytest.raises(OSError, match="is damaged"):
        read_bad_steps(path)
