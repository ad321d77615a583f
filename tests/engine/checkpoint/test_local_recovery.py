"""Which local checkpoint a run continues from, and what keeps it from continuing from one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_ranks import run_ranks

from megalaunch.engine.checkpoint import shard_transfer
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.local_recovery import choose_sources, newest_first, problem_of, transfers
from megalaunch.engine.checkpoint.local_shard import layout_digest, load_shard, write_shard
from megalaunch.engine.checkpoint.node_folder import NodeFolder, open_node_folder
from megalaunch.engine.checkpoint.shard_transfer import receive_shard, send_shard
from megalaunch.rundir.checkpoint.local_shards import (
    LocalShard,
    list_shards,
    rank_folder,
    shard_directory,
    superseded_shards,
)
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.fence import Fence, Superseded
from megalaunch.rundir.paths import RunDirectory

LAYOUTS = ["a", "b"]


def shard(rank: int, step: int = 6, **changes: object) -> LocalShard:
    """The shard of a rank of two, saved by the first attempt of a run."""
    return replace(LocalShard(rank, step, 1, 1, 2, LAYOUTS[rank]), **changes)


def write(folder: Path, described: LocalShard, value: float = 1.0, fence: Fence | None = None) -> Path:
    position = {"step": described.step, "tokens": 0}
    check = fence.check if fence else lambda: None
    write_shard(folder, described, {"w": torch.full((64,), float(value))}, position, lambda done, total: None, check)
    return shard_directory(folder, described.rank, described.step)


def problem(held: list[list[LocalShard]], resumes: tuple[int, ...] = (0,)) -> str | None:
    return problem_of(newest_first(held, after=5)[0], LAYOUTS, resumes)


@pytest.mark.parametrize(
    ("shards", "resumes", "expected"),
    [
        ([shard(0), shard(1)], (0,), None),
        ([shard(0), shard(1)], (0, 6), None),  # another attempt continued from this very step
        ([shard(0), shard(1)], (0, 5), "attempt 1 saved it, and a later attempt continued from step 5"),
        ([shard(0), shard(1, resumes=2)], (0, 5), "no node holds the shard of rank 0"),
        ([shard(0, attempt=2), shard(1)], (0,), "no node holds the shard of rank 1"),
        ([shard(0)], (0,), "no node holds the shard of rank 1"),
        ([shard(0, world=4), shard(1, world=4)], (0,), "4 ranks saved it, and the run has 2"),
        ([shard(0), shard(1, layout="c")], (0,), "the layout has changed: rank 1 held other slices of the tensors"),
    ],
)
def test_what_keeps_a_run_from_a_local_checkpoint(shards, resumes, expected):
    assert problem([shards], resumes) == expected


def test_the_newest_step_is_first_and_none_up_to_that_in_the_run_directory():
    held = [[shard(0, 4), shard(0, 6), shard(0, 8)], [shard(1, 8)]]
    assert [checkpoint.step for checkpoint in newest_first(held, after=4)] == [8, 6]


def test_each_rank_gets_its_shard_from_its_own_node_if_that_has_it():
    """Four ranks on two nodes: node 0 has all shards but that of rank 1, node 1 those of ranks 1 and 2."""
    found = {rank: LocalShard(rank, 6, 1, 1, 4, "") for rank in range(4)}
    (checkpoint,) = newest_first([[found[0], found[2], found[3]], [found[1], found[2]]], after=0)
    sources = choose_sources(checkpoint, devices_per_node=2)
    assert sources == {0: 0, 1: 1, 2: 1, 3: 0}
    assert transfers(sources, devices_per_node=2) == [(1, 3), (3, 1)]


def test_a_shard_is_loaded_as_it_was_and_older_ones_are_superseded(tmp_path):
    for step, resumes in ((8, 1), (4, 2), (6, 2)):  # that of step 8 was dropped by the second resume
        write(tmp_path, shard(0, step, resumes=resumes), value=step)
    assert {(held.step, held.resumes) for held in list_shards(tmp_path)} == {(8, 1), (4, 2), (6, 2)}
    old = superseded_shards(rank_folder(tmp_path, 0), keep=1)
    assert [path.name for path in old] == ["step_00000004", "step_00000008"]
    target = {"w": torch.zeros(64)}
    load_shard(shard_directory(tmp_path, 0, 6), target)
    assert target["w"].eq(6).all()
    with pytest.raises(CheckpointError, match=r"'w' is torch.float32 \[64\], the run has torch.float32 \[32\]"):
        load_shard(shard_directory(tmp_path, 0, 6), {"w": torch.zeros(32)})


def test_a_digest_knows_names_dtypes_and_shapes():
    digests = {
        layout_digest({name: torch.zeros(shape, dtype=dtype)})
        for name in "vw"
        for shape in ((2, 3), (3, 2))
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert len(digests) == 8


def test_a_stale_attempt_publishes_no_shard(tmp_path):
    fences = [Fence(tmp_path / "attempts.jsonl") for _ in range(2)]
    for fence in fences:
        fence.claim()
    with pytest.raises(Superseded, match=r"attempt 2 .* has taken over the run"):
        write(tmp_path / "disk", shard(0), fence=fences[0])
    assert list(rank_folder(tmp_path / "disk", 0).iterdir()) == []
    write(tmp_path / "disk", shard(0), fence=fences[1])


def test_a_copy_has_the_bytes_of_the_shard_and_a_damaged_one_is_refused(tmp_path):
    """Rank 0 sends three shards to rank 1: a good one, one with a flipped bit, and one whose manifest is gone."""
    good, flipped, torn = (write(tmp_path / "sent", shard(0, step)) for step in (2, 4, 6))
    content = bytearray((flipped / "shard.safetensors").read_bytes())
    content[-1] ^= 1
    (flipped / "shard.safetensors").write_bytes(content)
    (torn / "manifest.json").unlink()

    def transfer() -> list[str]:
        problems = []
        for directory in (good, flipped, torn, good):
            if dist.get_rank() == 0:
                send_shard(directory, 1, None)
                continue
            try:
                receive_shard(shard_directory(tmp_path / "copies", 0, int(directory.name[-1])), 0, None, print)
            except CheckpointError as error:
                problems.append(str(error))
        return problems

    assert run_ranks(2, transfer)[1] == [
        "the copy does not have the hashes of its manifest",
        "the copy is incomplete: manifest.json: is missing, so the checkpoint is incomplete",
    ]
    copy = shard_directory(tmp_path / "copies", 0, 2)
    assert verify_checkpoint(copy) == []
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in good.iterdir()
    }
    assert [path.name for path in rank_folder(tmp_path / "copies", 0).iterdir()] == ["step_00000002"]


def test_a_copy_is_written_in_its_own_folder_only(tmp_path):
    (tmp_path / "shard").mkdir()
    with pytest.raises(CheckpointError, match=r"names a file outside of its folder: '\.\./shard\.json'"):
        shard_transfer._write(tmp_path / "shard", {"../shard.json": "{}"}, iter(()), lambda count: None)
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_a_folder_knows_its_neighbours_and_keeps_their_shards_only(tmp_path):
    node = NodeFolder(tmp_path, rank=4, world=8, devices_per_node=2)
    assert (node.node, node.nodes, node.next_rank, node.previous_rank) == (2, 4, 6, 2)
    for rank in range(8):
        write(tmp_path, LocalShard(rank, 6, 1, 1, 8, ""))
    node.remove_other_ranks()
    assert [held.rank for held in list_shards(tmp_path)] == [2, 3, 4, 5]


def test_nodes_find_that_they_share_a_folder(tmp_path):
    directory = RunDirectory(tmp_path / "run")

    def open_folders() -> list[bool]:
        os.environ["NODE_DISK"] = str(tmp_path / f"disk_{dist.get_rank()}")
        paths = (str(tmp_path / "shared"), "$NODE_DISK")
        return [open_node_folder("checkpoint.local", path, directory, 1, 1).is_private for path in paths]

    assert run_ranks(2, open_folders) == [[False, True], [False, True]]


def test_a_folder_of_another_user_is_refused_and_ones_own_is_private(tmp_path, monkeypatch):
    folder = open_node_folder("checkpoint.memory", str(tmp_path), RunDirectory(tmp_path / "run"), 1, 1).path
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CheckpointError, match=r"checkpoint\.memory\.path=.* belongs to another user"):
        open_node_folder("checkpoint.memory", str(tmp_path), RunDirectory(tmp_path / "run"), 1, 1)


def test_a_path_with_an_unknown_variable_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="name an absolute path, with variables that every node has"):
        open_node_folder("checkpoint.local", "$DISK_OF_NO_NODE/checkpoints", RunDirectory(tmp_path), 1, 1)
