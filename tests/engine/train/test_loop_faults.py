"""What goes wrong around the steps, on one rank or at an awkward moment, ends every rank alike and loses nothing."""

from __future__ import annotations

import errno
import os
import signal

import pytest
from looped_run import Rank, events, metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.data.errors import DataError
from megalaunch.engine.train import checkpointer as saver_module
from megalaunch.engine.train import run_logger as record_module
from megalaunch.engine.train.forward_backward import SingleStage
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress
from megalaunch.schema import RunSpec, with_values


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    return ten_steps(tmp_path_factory.mktemp("tokens"))


def test_validation_rows_that_one_rank_cannot_read_end_all_ranks(spec, tmp_path):
    def spoil(rank: Rank) -> None:
        def fail(index: int) -> None:
            raise DataError("token 99 is no id", file="validation.bin")

        if rank.rank == 1:
            rank.during("validation", fail)

    ending = run_loop(spec, tmp_path, spoil)
    assert (int(ending.exit_code), ending.step) == (3, 3)
    assert "validation.bin: token 99 is no id" in ending.reason


def test_a_stop_before_the_first_step_trains_nothing(spec, tmp_path):
    def spoil(rank: Rank) -> None:
        rank.stop.signal = signal.SIGTERM if rank.rank == 1 else None

    ending = run_loop(spec, tmp_path, spoil)
    assert (int(ending.exit_code), ending.step) == (75, 0)
    assert metrics(tmp_path) == []
    assert list(RunDirectory(tmp_path).checkpoints.iterdir()) == []


def test_a_stop_while_the_last_validation_is_made_up_does_not_count_as_the_end(spec, tmp_path):
    def spoil(rank: Rank) -> None:
        def interrupt(index: int) -> None:
            rank.stop.signal = signal.SIGINT

        if rank.rank == 1:
            rank.during("validation", interrupt)

    four = with_values(spec, {"train.steps": 4, "train.validation_interval": 0})
    for _ in range(2):  # once after step 4, once when the next launch makes the validation up
        ending = run_loop(four, tmp_path, spoil)
        assert (int(ending.exit_code), ending.step) == (130, 4)
    ending = run_loop(four, tmp_path)
    assert (int(ending.exit_code), ending.reason) == (0, "finished all 4 steps")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 4]


def test_a_stop_during_a_save_needs_no_second_one(spec, tmp_path, monkeypatch):
    real = saver_module.save_run

    def spoil(rank: Rank) -> None:
        def interrupted(*arguments):
            rank.stop.signal = signal.SIGTERM
            return real(*arguments)

        monkeypatch.setattr(saver_module, "save_run", interrupted if rank.rank == 0 else real)

    ending = run_loop(with_values(spec, {"checkpoint.interval": 2}), tmp_path, spoil)
    assert (int(ending.exit_code), ending.step) == (75, 2)
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [2]


@pytest.mark.slow
def test_a_disk_that_is_full_for_metrics_ends_all_ranks_and_loses_no_line(spec, tmp_path, monkeypatch):
    saving = with_values(spec, {"checkpoint.interval": 2})

    def spoil(rank: Rank) -> None:
        real = record_module.append_line

        def full(path, record):
            if path.name == "metrics.jsonl" and record["step"] == 4:
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
                os.write(descriptor, b'{"step": 4, "lo')
                os.close(descriptor)
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, record)

        monkeypatch.setattr(record_module, "append_line", full)

    run_loop(saving, tmp_path / "whole")
    ending = run_loop(saving, tmp_path / "parts", spoil)
    assert (int(ending.exit_code), ending.step) == (4, 4)
    assert f"{tmp_path / 'parts' / 'metrics.jsonl'} cannot be written: No space left on device" in ending.reason
    saved = [event["step"] for event in events(tmp_path / "parts", "checkpoint")]
    assert saved == [2]  # one of step 4 would go on without its line
    run_loop(saving, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_stopping_at_a_step_that_is_past_changes_nothing(spec, tmp_path):
    run_loop(with_values(spec, {"train.exit_at_step": 4}), tmp_path)
    before = metrics(tmp_path)
    for stop_at, said in ((4, "stopped after step 4 of 10 as asked"), (2, "step 4, past train.exit_at_step=2")):
        ending = run_loop(with_values(spec, {"train.exit_at_step": stop_at}), tmp_path)
        assert (int(ending.exit_code), ending.step) == (0, 4)
        assert said in ending.reason
    ending = run_loop(with_values(spec, {"train.steps": 3}), tmp_path)
    assert (int(ending.exit_code), ending.step) == (0, 4)
    assert "step 4, past train.steps=3" in ending.reason
    assert metrics(tmp_path) == before
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [4]


def test_a_run_without_validation_documents(spec, tmp_path):
    ending = run_loop(with_values(spec, {"data.validation_prefix": None, "train.steps": 3}), tmp_path)
    assert int(ending.exit_code) == 0
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def test_nothing_is_read_past_the_last_step(spec, tmp_path):
    """Samples past the request cost a new shuffle of everything."""

    def spoil(rank: Rank) -> None:
        def too_far(index: int) -> None:
            with (tmp_path / "highest").open("a") as file:
                file.write(f"{index}\n")

        rank.during("training", too_far)

    run_loop(with_values(spec, {"train.steps": 3}), tmp_path, spoil)
    assert sorted({int(line) for line in (tmp_path / "highest").read_text().split()}) == list(range(24))


def test_a_long_validation_shows_that_it_moves(spec, tmp_path, monkeypatch):
    """Before the forward pass of each batch."""
    evaluate = SingleStage.evaluate

    def spoil(rank: Rank) -> None:
        def note(*arguments):
            progress = read_progress(RunDirectory(tmp_path).progress(rank.rank))
            with (tmp_path / f"ticks_{rank.rank}").open("a") as file:
                file.write(f"{progress.phase} {progress.ticks}\n")
            return evaluate(*arguments)

        monkeypatch.setattr(SingleStage, "evaluate", note)

    run_loop(with_values(spec, {"train.steps": 3, "batch.micro_batch_size": 1}), tmp_path, spoil)
    seen = (tmp_path / "ticks_1").read_text().splitlines()
    assert len(seen) > 3
    assert len(set(seen)) == len(seen)
    assert all(line.startswith("validating ") for line in seen)


@pytest.mark.parametrize(
    ("precision", "strategy", "row"),
    slow_but([("fp32", "optim_grads_params", 0), ("bf16", "optim", 16)], ("fp32", "optim_grads_params", 0), every=()),
    ids=["at_once", "later"],
)
def test_a_validation_cut_short_leaves_the_weights_as_they_are_saved(spec, tmp_path, precision, strategy, row):
    """Before its first forward pass, or at the next check, after some that gathered parameters and cast them."""
    layout = {"precision.compute_dtype": precision, "parallel.data_sharding": strategy, "batch.micro_batch_size": 1}
    small = with_values(spec, layout | {"train.steps": 4})

    def spoil(rank: Rank) -> None:
        def interrupt(index: int) -> None:
            if index == row:
                rank.stop.signal = signal.SIGTERM

        rank.during("validation", interrupt)

    run_loop(small, tmp_path / "whole")
    ending = run_loop(small, tmp_path / "parts", spoil)
    assert (int(ending.exit_code), ending.step) == (75, 3)
    run_loop(small, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(("limit", "code", "step"), slow_but([(3, 7, 4), (0, 0, 10)], (3, 7, 4)))
def test_gradients_of_exactly_0_are_warned_of_and_end_the_run(spec, tmp_path, limit, code, step):
    """A learning rate far too high: from step 2 on nothing is learned, and no number says so."""
    values = {"optimizer.lr": 1e4, "optimizer.weight_decay": 0.0, "schedule.warmup_steps": 0}
    saving = {"checkpoint.interval": 1, "checkpoint.keep_last": 2}
    dead = with_values(spec, values | saving | {"train.max_zero_grad_steps": limit})
    ending = run_loop(dead, tmp_path)
    assert (int(ending.exit_code), ending.step) == (code, step)
    assert [line["grad_norm"] for line in metrics(tmp_path) if "loss" in line][1:] == [0.0] * (step - 1)
    (warning,) = events(tmp_path, "zero_gradient")
    assert (warning["step"], warning["limit"]) == (2, limit)
    saved = [event["step"] for event in events(tmp_path, "checkpoint")]
    if limit:
        assert "is exactly 0 since step 2, for 3 steps in a row" in ending.reason
        assert saved == [1]
    else:
        assert saved == list(range(1, 11))
