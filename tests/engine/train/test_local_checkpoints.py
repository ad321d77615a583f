"""Local checkpoints: a run continues from the newest step whose shards the nodes hold, as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_ranks import RanksFailed
from looped_run import Rank, events, metrics, run_loop, ten_steps

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.train import local_checkpointer
from megalaunch.engine.train.local_checkpointer import LocalCheckpointer
from megalaunch.rundir.checkpoint.local_shards import list_shards
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.resumes import read_resumes
from megalaunch.schema import RunSpec, with_values

DAMAGED = "is damaged (its sha256 is not the one in the manifest)"
NODES = {"cluster.nodes": 2, "cluster.devices_per_node": 1}


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RunSpec:
    """Ten steps on two ranks of one node, with a checkpoint of step 5 and local ones of even steps."""
    local = {"checkpoint.interval": 5, "checkpoint.local.interval": 2, "checkpoint.local.path": "$NODE_DISK"}
    return with_values(ten_steps(tmp_path_factory.mktemp("tokens")), local)


@pytest.fixture(scope="module")
def whole(spec, tmp_path_factory) -> Path:
    """The run that nothing stops, and that has no local checkpoints."""
    root = tmp_path_factory.mktemp("whole")
    run_loop(with_values(spec, {"checkpoint.local.interval": 0}), root)
    return root


@pytest.fixture
def killed(monkeypatch, tmp_path) -> Callable[[RunSpec], None]:
    """Run until rank 1 is killed after step 8, when the local checkpoint of step 6 is complete."""

    def run(spec: RunSpec) -> None:
        save = LocalCheckpointer.save

        def kill(saver, position):
            saver._saver.wait(position)
            if position.step == 8 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            save(saver, position)

        with monkeypatch.context() as patched:
            patched.setattr(LocalCheckpointer, "save", kill)
            with pytest.raises(RanksFailed, match=r"rank 1 was killed by SIGKILL"):
                run_loop(spec, tmp_path / "run", on_own_disks(spec, tmp_path))

    return run


def on_own_disks(spec: RunSpec, folder: Path) -> Callable[[Rank], None]:
    """Give each node a disk of its own."""

    def mount(rank: Rank) -> None:
        os.environ["NODE_DISK"] = str(disk(folder, rank.rank // int(spec.cluster.devices_per_node)))

    return mount


def disk(folder: Path, node: int) -> Path:
    return folder / f"disk_{node}"


def held(folder: Path, node: int) -> list[tuple[int, int]]:
    """The shards on a node's disk as (rank, step)."""
    (run,) = disk(folder, node).iterdir()
    return [(shard.rank, shard.step) for shard in list_shards(run)]


def continue_run(spec: RunSpec, folder: Path) -> int:
    """Run to the end; return the step from which the run continued."""
    assert run_loop(spec, folder / "run", on_own_disks(spec, folder)).reason == "finished all 10 steps"
    return [event["step"] for event in events(folder / "run", "resumed")][-1]


def notes(folder: Path) -> list[str]:
    return [event["message"] for event in events(folder / "run", "note")]


def flip_a_bit(folder: Path, node: int, rank: int) -> None:
    """Flip a bit in the middle of the tensors of a shard of step 6."""
    (file,) = disk(folder, node).glob(f"*/rank_{rank:05d}/step_00000006/shard.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    first, second = (read_tensors(RunDirectory(root).checkpoint(10)) for root in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_killed_run_continues_exactly_from_the_disk_of_its_node(spec, whole, killed, tmp_path):
    killed(spec)
    assert held(tmp_path, 0) == [(0, 6), (1, 6)]
    assert continue_run(spec, tmp_path) == 6
    assert_same_run(whole, tmp_path / "run")
    assert list(disk(tmp_path, 0).iterdir()) == []  # the last checkpoint is in the run directory


@pytest.mark.parametrize(("lost", "damaged"), [(0, None), pytest.param(None, 1, marks=pytest.mark.slow)])
def test_a_lost_or_damaged_shard_is_restored_from_its_copy(spec, whole, killed, tmp_path, lost, damaged):
    nodes = with_values(spec, NODES)
    killed(nodes)
    assert held(tmp_path, 0) == held(tmp_path, 1) == [(0, 6), (1, 6)]
    if lost is not None:
        shutil.rmtree(disk(tmp_path, lost))
    else:
        flip_a_bit(tmp_path, node=damaged, rank=damaged)
    assert continue_run(nodes, tmp_path) == 6
    rank = damaged if lost is None else lost
    assert notes(tmp_path) == [f"restored from other nodes: the local shards of rank {rank}"]
    refused = [event["reason"] for event in events(tmp_path / "run", "checkpoint_refused")]
    assert refused == ([] if damaged is None else [f"shard.safetensors: {DAMAGED} (on node 1)"])
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_a_damaged_shard_without_a_copy_leaves_the_checkpoint_in_the_run_directory(spec, whole, killed, tmp_path):
    killed(spec)
    flip_a_bit(tmp_path, node=0, rank=1)
    assert continue_run(spec, tmp_path) == 5
    assert notes(tmp_path) == ["the local checkpoint of step 6 is not used: no node holds the shard of rank 1"]
    assert read_resumes(RunDirectory(tmp_path / "run").resumes) == [0, 5]
    assert_same_run(whole, tmp_path / "run")


def test_a_local_save_that_fails_is_reported_once_and_ends_nothing(spec, whole, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        if os.environ["RANK"] == "1":
            raise CheckpointError("no such disk")

    monkeypatch.setattr(local_checkpointer, "write_shard", fail)
    assert run_loop(spec, tmp_path / "run", on_own_disks(spec, tmp_path)).reason == "finished all 10 steps"
    assert notes(tmp_path) == ["the local checkpoint of step 2 was not saved: rank 1: no such disk; training continues"]
    assert events(tmp_path / "run", "local_checkpoint") == []
    assert_same_run(whole, tmp_path / "run")
