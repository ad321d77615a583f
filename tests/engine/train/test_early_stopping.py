"""Early stopping ends all ranks at the same step, also after a stop and a resume; the state is in the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from looped_run import events, metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.engine.train.early_stopping import EarlyStoppingState, count_validation, is_stopped
from megalaunch.engine.train.progress import TrainProgress
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.early_stopping import EarlyStoppingSpec

STOPS_AT_9 = {"train.early_stopping.patience": 2, "train.early_stopping.min_delta": 10.0}


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    """Validates after steps 3, 6, 9 and 10; no loss falls by 10, so that 6 and 9 are no improvement."""
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), STOPS_AT_9)


def counted(losses: list[float], patience: int = 2, min_delta: float = 0.0) -> EarlyStoppingState:
    settings, state = EarlyStoppingSpec(patience=patience, min_delta=min_delta), None
    for step, loss in enumerate(losses, start=1):
        state = count_validation(state, settings, step, {"validation_loss": loss})
        if is_stopped(state, settings):
            break
    assert state is not None
    return state


def test_the_count_starts_again_with_every_improvement():
    assert counted([3, 2, 2.5, 1, 1.5, 1.2, 0.5]) == EarlyStoppingState("validation_loss", 1, 4, 2, 6)
    assert counted([3, 2.95, 2.91], min_delta=0.1).step == 3
    assert counted([3, 2.95, 2.8, 2.75], min_delta=0.1) == EarlyStoppingState("validation_loss", 2.8, 3, 1, 4)
    assert counted([math.nan, 2, math.nan, math.nan]) == EarlyStoppingState("validation_loss", 2, 2, 2, 4)


def test_a_repeated_validation_counts_once_and_another_metric_starts_again():
    settings = EarlyStoppingSpec(patience=3)
    state = count_validation(None, settings, 5, {"validation_loss": 2.0})
    assert count_validation(state, settings, 5, {"validation_loss": 9.0}) == state
    assert count_validation(state, settings, 6, {"validation_loss/code": 9.0}) == state
    other = EarlyStoppingSpec(patience=1, metric="validation_loss/code")
    assert not is_stopped(state, other)
    state = count_validation(state, other, 6, {"validation_loss/code": 9.0})
    assert state == EarlyStoppingState("validation_loss/code", 9.0, 6, 0, 6)
    assert count_validation(None, EarlyStoppingSpec(), 1, {"validation_loss": 1.0}) is None


def test_the_state_is_part_of_the_progress_in_a_checkpoint():
    progress = TrainProgress(6, 100, early_stopping=EarlyStoppingState("validation_loss", None, 0, 1, 6))
    assert TrainProgress.from_document(progress.to_document()) == progress
    assert TrainProgress.from_document({"step": 6, "tokens": 100}).early_stopping is None
    with pytest.raises(ValueError, match="early stopping"):
        TrainProgress.from_document({"step": 6, "tokens": 100, "early_stopping": {"best": "low"}})


def test_a_run_that_stops_early_can_be_interrupted_and_goes_on_with_more_patience(spec, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    end = run_loop(spec, whole)
    assert end.exit_code == ExitCode.DONE
    assert end.reason.startswith(
        "stopped early after step 9 of 10: validation_loss has not improved by more than 10 for 2 validations; "
        "the best is "
    )
    assert end.reason.endswith(" of step 3")
    (event,) = events(whole, "early_stopping")
    assert (event["step"], event["best_step"], event["validations"]) == (9, 3, 2)

    assert "after step 7" in run_loop(with_values(spec, {"train.exit_at_step": 7}), parts).reason
    assert run_loop(spec, parts).reason == end.reason
    assert metrics(parts) == metrics(whole)
    assert run_loop(spec, parts).reason == end.reason  # no step more
    assert metrics(parts) == metrics(whole)
    longer = with_values(spec, {"train.early_stopping.patience": 4})
    assert run_loop(longer, parts).reason == "finished all 10 steps"
    assert [line["step"] for line in metrics(parts) if "loss" in line] == list(range(1, 11))


LAYOUTS = [
    {"parallel.dp": 1, "parallel.tp": 2},
    {"parallel.dp": 1, "parallel.pp": 2, "parallel.schedule": "1f1b", "model.num_layers": 2},
]


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, every=[LAYOUTS[1]]))
def test_the_same_step_under_other_layouts(spec, tmp_path, layout):
    end = run_loop(with_values(spec, {**layout, "batch.micro_batch_size": 1}), tmp_path)
    assert end.reason.startswith("stopped early after step 9 of 10")


def test_a_metric_that_the_run_lacks_ends_it_at_the_start(spec, tmp_path: Path):
    end = run_loop(with_values(spec, {"train.early_stopping.metric": "validation_loss/code"}), tmp_path)
    assert (end.exit_code, end.step) == (ExitCode.CONFIGURATION, 0)
    assert end.reason == (
        "train.early_stopping.metric=validation_loss/code is no loss of this run (it has validation_loss)"
    )
