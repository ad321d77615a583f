"""Local checkpoints: a run continues from the newest step whose shards the nodes hold, as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_ranks import RanksFailed
from looped_run import Rank, events, metrics, run_loop, ten_steps

from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.shard_transfer import copy_shard
from megalaunch.engine.checkpoint.store import read_tensors
from megalaunch.engine.train import local_tier
from megalaunch.engine.train.local_checkpointer import LocalCheckpointer
from megalaunch.rundir.checkpoint.local_shards import list_shards
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.resumes import read_resumes
from megalaunch.schema import RunSpec, with_values

DAMAGED = "is damaged (its sha256 is not the one in the manifest)"
IN_MEMORY = {"checkpoint.memory.interval": 2, "checkpoint.memory.path": "$NODE_MEMORY"}
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


def run_until_killed(spec: RunSpec, folder: Path) -> None:
    """Run until rank 1 is killed after step 8, when the local checkpoint of step 6 is complete."""
    save = LocalCheckpointer.save

    def kill(saver, position, is_saved):
        saver.wait(position)
        saver._disk.background.wait(position)
        if position.step == 8 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        save(saver, position, is_saved)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalCheckpointer, "save", kill)
        with pytest.raises(RanksFailed, match=r"rank 1 was killed by SIGKILL"):
            run_loop(spec, folder / "run", on_own_disks(spec, folder))


def on_own_disks(spec: RunSpec, folder: Path) -> Callable[[Rank], None]:
    """Give each node a disk of its own."""

    def mount(rank: Rank) -> None:
        node = rank.rank // int(spec.cluster.devices_per_node)
        os.environ |= {"NODE_DISK": str(disk(folder, node)), "NODE_MEMORY": str(memory(folder, node))}

    return mount


def disk(folder: Path, node: int) -> Path:
    return folder / f"disk_{node}"


def memory(folder: Path, node: int) -> Path:
    return folder / f"memory_{node}"


def held(place: Path) -> list[tuple[int, int]]:
    """The shards on a node's disk or in its memory as (rank, step)."""
    (run,) = place.iterdir()
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


@pytest.fixture(scope="module")
def tiered(spec, tmp_path_factory) -> tuple[RunSpec, Path]:
    """A run on two nodes, killed after step 8: it saved in memory at even steps, and to disk at step 6."""
    folder = tmp_path_factory.mktemp("tiered")
    tiers = with_values(spec, NODES | IN_MEMORY | {"checkpoint.local.interval": 6})
    run_until_killed(tiers, folder)
    shutil.copytree(folder, folder.with_suffix(".killed"))
    return tiers, folder


MEMORY, DISKS = ("memory_0", "memory_1"), ("disk_0", "disk_1")


@pytest.mark.parametrize(
    ("lost", "step", "tier"),
    [
        pytest.param((), 6, "memory_0", id="nothing", marks=pytest.mark.slow),
        pytest.param(("memory_0", "disk_0"), 6, "memory_0", id="node"),
        pytest.param((*MEMORY, "disk_0"), 6, "disk_0", id="memory"),
        pytest.param((*MEMORY, *DISKS), 5, "checkpoints", id="all", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_from_the_fastest_tier_that_is_left(tiered, whole, lost, step, tier):
    spec, folder = tiered
    shutil.rmtree(folder)
    shutil.copytree(folder.with_suffix(".killed"), folder)
    assert all(held(folder / place) == [(0, 6), (1, 6)] for place in (*MEMORY, *DISKS))
    for place in lost:
        shutil.rmtree(folder / place)
    assert continue_run(spec, folder) == step
    assert Path(events(folder / "run", "resumed")[-1]["checkpoint"]).parent.name == tier
    assert_same_run(whole, folder / "run")
    assert [list((folder / place).iterdir()) for place in (*MEMORY, *DISKS)] == [[], [], [], []]
    saved = [(event["step"], event["tier"], event["copied"]) for event in events(folder / "run", "local_checkpoint")]
    assert saved[:4] == [(2, "memory", True), (4, "memory", True), (6, "memory", True), (6, "local", True)]


def test_a_slow_disk_delays_no_save_in_memory(spec, tmp_path, monkeypatch):
    """The copy of step 6 to disk waits until step 8 is in memory: step 6 is retained there although `keep` is 1."""

    def copy_later(source: Path, *arguments: object) -> None:
        newer = source.parent / "step_00000008"
        deadline = time.monotonic() + 20
        while not newer.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        copy_shard(source, *arguments)

    monkeypatch.setattr(local_tier, "copy_shard", copy_later)
    tiers = with_values(spec, IN_MEMORY | {"checkpoint.interval": 0, "checkpoint.local.interval": 6})
    run_loop(tiers, tmp_path / "run", on_own_disks(spec, tmp_path))
    saved = [(event["step"], event["tier"]) for event in events(tmp_path / "run", "local_checkpoint")]
    assert saved[3:] == [(8, "memory"), (6, "local")]


@pytest.mark.slow
def test_a_killed_run_continues_exactly_from_the_disk_of_its_node(spec, whole, tmp_path):
    run_until_killed(spec, tmp_path)
    assert held(disk(tmp_path, 0)) == [(0, 6), (1, 6)]
    assert continue_run(spec, tmp_path) == 6
    assert_same_run(whole, tmp_path / "run")
    assert list(disk(tmp_path, 0).iterdir()) == []  # the last checkpoint is in the run directory


@pytest.mark.parametrize(("lost", "damaged"), [(0, None), pytest.param(None, 1, marks=pytest.mark.slow)])
def test_a_lost_or_damaged_shard_is_restored_from_its_copy(spec, whole, tmp_path, lost, damaged):
    nodes = with_values(spec, NODES)
    run_until_killed(nodes, tmp_path)
    assert held(disk(tmp_path, 0)) == held(disk(tmp_path, 1)) == [(0, 6), (1, 6)]
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
def test_a_damaged_shard_without_a_copy_leaves_the_checkpoint_in_the_run_directory(spec, whole, tmp_path):
    run_until_killed(spec, tmp_path)
    flip_a_bit(tmp_path, node=0, rank=1)
    assert continue_run(spec, tmp_path) == 5
    assert notes(tmp_path) == ["the local checkpoint of step 6 is not used: no node holds the shard of rank 1"]
    assert read_resumes(RunDirectory(tmp_path / "run").resumes) == [0, 5]
    assert_same_run(whole, tmp_path / "run")


def test_a_local_save_that_fails_is_reported_once_and_ends_nothing(spec, whole, tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        if os.environ["RANK"] == "1":
            raise CheckpointError("no such disk")

    monkeypatch.setattr(local_tier, "write_shard", fail)
    assert run_loop(spec, tmp_path / "run", on_own_disks(spec, tmp_path)).reason == "finished all 10 steps"
    assert notes(tmp_path) == ["the local checkpoint of step 2 was not saved: rank 1: no such disk; training continues"]
    assert events(tmp_path / "run", "local_checkpoint") == []
    assert_same_run(whole, tmp_path / "run")
