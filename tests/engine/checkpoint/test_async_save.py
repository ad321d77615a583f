"""Saving beside training: the same checkpoints as saving at once, whatever the timing, and every failure is told."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_ranks import RanksFailed
from looped_run import Rank, events, metrics, run_loop, ten_steps
from slow_cases import slow_but

from megalaunch.data.errors import DataError
from megalaunch.engine.checkpoint.store import read_tensors, verify_checkpoint
from megalaunch.engine.train import checkpointer as saver_module
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, with_values

SLOW = 0.3  # seconds of a save: several steps of training


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    beside = {"checkpoint.interval": 3, "checkpoint.async_save": True, "checkpoint.keep_last": 0}
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), beside)


@pytest.fixture
def before_writing(monkeypatch) -> Callable[[Callable[[int], None]], None]:
    """Have ranks do something on the saving thread before it writes the checkpoint of a step."""
    real = saver_module.save_run

    def set_action(action: Callable[[int], None]) -> None:
        def save_run(directory, spec, tensors, position, *rest):
            action(position.step)
            return real(directory, spec, tensors, position, *rest)

        monkeypatch.setattr(saver_module, "save_run", save_run)

    return set_action


def saved(root: Path) -> dict[int, Path]:
    """The finished checkpoints by step; nothing else lies beside them."""
    found = {int(path.name.removeprefix("step_")): path for path in RunDirectory(root).checkpoints.iterdir()}
    assert all(verify_checkpoint(path) == [] for path in found.values())
    return found


def test_the_same_checkpoints_as_saved_at_once(spec, tmp_path, before_writing):
    run_loop(with_values(spec, {"checkpoint.async_save": False}), tmp_path / "at_once")
    before_writing(lambda step: time.sleep(SLOW))
    run_loop(spec, tmp_path / "beside")
    assert metrics(tmp_path / "beside") == metrics(tmp_path / "at_once")
    ours, theirs = saved(tmp_path / "beside"), saved(tmp_path / "at_once")
    assert ours.keys() == theirs.keys() == {3, 6, 9, 10}
    for step, path in theirs.items():
        mine, reference = read_tensors(ours[step]), read_tensors(path)
        assert mine.keys() == reference.keys()
        assert all(torch.equal(mine[name], reference[name]) for name in reference), step
        assert (ours[step] / "position.json").read_text() == (path / "position.json").read_text()
    beside = [event for event in events(tmp_path / "beside", "checkpoint") if event["step"] in (3,)]
    assert all(event["waited_seconds"] < SLOW < event["seconds"] for event in beside)


@pytest.mark.slow
def test_a_run_goes_on_exactly_from_one_saved_beside(spec, tmp_path, before_writing):
    run_loop(spec, tmp_path / "whole")
    before_writing(lambda step: time.sleep(SLOW))

    def spoil(rank: Rank) -> None:
        def stop(index: int) -> None:
            if index // 8 == 4:  # the batch of step 5, while that of step 3 is written
                rank.stop.signal = signal.SIGTERM

        if rank.rank == 1:
            rank.during("training", stop)

    ending = run_loop(spec, tmp_path / "parts", spoil)
    assert int(ending.exit_code) == 75
    assert set(saved(tmp_path / "parts")) == {3, ending.step}
    run_loop(spec, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    mine, reference = (read_tensors(saved(tmp_path / name)[10]) for name in ("parts", "whole"))
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


@pytest.mark.slow
def test_one_save_at_a_time_and_none_is_left_out(spec, tmp_path, before_writing):
    folder = RunDirectory(tmp_path).checkpoints

    def one_at_a_time(step: int) -> None:
        assert list(folder.glob(".unfinished-*")) == []
        assert step == 1 or (folder / f"step_{step - 1:08d}").exists()
        time.sleep(0.05)

    before_writing(one_at_a_time)
    run_loop(with_values(spec, {"checkpoint.interval": 1}), tmp_path)
    assert set(saved(tmp_path)) == set(range(1, 11))
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == list(range(1, 11))


def test_old_ones_are_removed_by_the_same_rules(spec, tmp_path):
    rules = {"checkpoint.interval": 2, "checkpoint.keep_last": 1, "checkpoint.keep_every": 4}
    run_loop(with_values(spec, rules), tmp_path)
    assert set(saved(tmp_path)) == {4, 8, 10}


@pytest.mark.parametrize(
    ("failing", "noticed"), [(6, range(6, 10)), pytest.param(9, (10,), marks=(pytest.mark.slow, pytest.mark.release))]
)
def test_a_failure_of_one_rank_ends_all_alike_and_keeps_what_there_was(
    spec, tmp_path, before_writing, failing, noticed
):
    def limit(step: int) -> None:
        if step == failing and int(os.environ["RANK"]) == 1:
            time.sleep(SLOW / 3)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    before_writing(limit)
    ending = run_loop(spec, tmp_path)
    assert int(ending.exit_code) == 4
    assert ending.step in noticed
    path = RunDirectory(tmp_path).checkpoint(failing)
    assert f"cannot save the checkpoint {path}: a file exceeds the limit on file sizes" in ending.reason
    assert set(saved(tmp_path)) == {step for step in (3, 6) if step < failing}


def test_an_end_for_another_reason_waits_for_the_save(spec, tmp_path, before_writing):
    before_writing(lambda step: time.sleep(SLOW))

    def spoil(rank: Rank) -> None:
        def fail(index: int) -> None:
            if index // 8 == 4:
                raise DataError("token 99 is no id", file="train.bin")

        if rank.rank == 1:
            rank.during("training", fail)

    ending = run_loop(spec, tmp_path, spoil)
    assert (int(ending.exit_code), ending.step) == (3, 4)
    assert set(saved(tmp_path)) == {3}


def test_such_an_end_tells_of_a_save_that_failed(spec, tmp_path, before_writing):
    def limit(step: int) -> None:
        time.sleep(SLOW)
        if int(os.environ["RANK"]) == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    before_writing(limit)

    def spoil(rank: Rank) -> None:
        def fail(index: int) -> None:
            if index // 8 == 3:
                raise DataError("token 99 is no id", file="train.bin")

        if rank.rank == 1:
            rank.during("training", fail)

    ending = run_loop(spec, tmp_path, spoil)
    assert (int(ending.exit_code), ending.step) == (3, 3)
    assert saved(tmp_path) == {}
    (note,) = events(tmp_path, "note")
    assert "step_00000003: a file exceeds the limit on file sizes" in note["message"]


@pytest.mark.parametrize("victim", slow_but([0, 1], every=[0]))
def test_kill_of_a_rank_in_the_middle(spec, tmp_path, before_writing, monkeypatch, victim):
    run_loop(spec, tmp_path / "whole")

    def kill(step: int) -> None:
        if step == 6 and int(os.environ["RANK"]) == victim:
            monkeypatch.setattr(os, "fsync", lambda descriptor: os.kill(os.getpid(), signal.SIGKILL))

    before_writing(kill)
    with pytest.raises(RanksFailed, match=f"rank {victim} was killed by SIGKILL"):
        run_loop(spec, tmp_path / "parts")
    folder = RunDirectory(tmp_path / "parts").checkpoints
    left = len(list(folder.glob(".unfinished-*")))
    assert left == 1 or (left == 0 and victim == 1)  # the first rank removes it, if it is still there to do so
    assert not (folder / "step_00000006").exists()
    before_writing(lambda step: None)
    run_loop(with_values(spec, {"train.exit_at_step": 4}), tmp_path / "parts")
    assert set(saved(tmp_path / "parts")) == {3, 4}  # what the killed one left is gone before anything is saved
    run_loop(spec, tmp_path / "parts")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
