"""A save that fails on one rank fails on all, alike; the older checkpoint stays."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_tensors import reference, spread
from forked_ranks import RanksFailed, run_ranks

from megalaunch.engine.checkpoint.store import (
    CheckpointError,
    latest_valid_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)


def save_step(folder: Path, step: int) -> Path:
    directory = folder / f"step_{step:08d}"
    save_checkpoint(directory, spread(reference(), "rows"), {"trainer": {"step": step}}, {})
    return directory


def test_a_write_error_of_one_rank_reaches_every_rank(tmp_path: Path):
    def body() -> str:
        save_step(tmp_path, 1)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(CheckpointError) as caught:
            save_step(tmp_path, 2)
        dist.barrier()  # nobody waits for a rank that gave up
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert f"{tmp_path / 'step_00000002'}: a file exceeds the limit on file sizes" in first
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert verify_checkpoint(tmp_path / "step_00000001") == []


def test_an_unwritable_folder_is_named_on_every_rank(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    def body() -> str:
        with pytest.raises(CheckpointError) as caught:
            save_step(tmp_path / "file", 1)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith(f"cannot save the checkpoint {tmp_path / 'file' / 'step_00000001'}: ")


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_of_a_rank_in_mid_save(tmp_path: Path, victim: int):
    def body() -> None:
        old = save_step(tmp_path, 1)
        assert verify_checkpoint(old) == []
        if dist.get_rank() == victim:
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)  # its shard is written by then
        save_step(tmp_path, 2)

    with pytest.raises(RanksFailed, match=f"rank {victim} was killed by SIGKILL"):
        run_ranks(2, body)
    names = {path.name for path in tmp_path.iterdir()}
    assert "step_00000001" in names
    assert "step_00000002" not in names

    def again() -> Path | None:
        found = latest_valid_checkpoint(tmp_path, lambda path, problems: None)
        assert found == tmp_path / "step_00000001"
        return save_step(tmp_path, 2)

    run_ranks(2, again)
    assert verify_checkpoint(tmp_path / "step_00000002") == []


def test_a_shard_that_only_one_node_sees_is_no_checkpoint(tmp_path: Path):
    def body() -> str:
        if dist.get_rank() == 1:  # its write lands elsewhere, as on a disk of its own
            tmp_open, elsewhere = os.open, tmp_path / "elsewhere.safetensors"
            os.open = lambda path, *rest: tmp_open(elsewhere, *rest)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "step_00000001", spread(reference(), "rows"), {}, {})
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 0 cannot find shard_00001.safetensors" in first
    assert "a file system that all nodes share" in first


def test_a_bad_file_fails_the_load_on_every_rank(tmp_path: Path):
    directory = tmp_path / "step_00000001"

    def body() -> str:
        tensors = {"x": torch.zeros(3)}
        save_checkpoint(directory, tensors, {}, {})
        if dist.get_rank() == 0:
            (shard,) = directory.glob("shard_*")
            shard.write_bytes(shard.read_bytes()[:-1])
        dist.barrier()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(directory, tensors)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "bad safetensors header: the tensors end at byte" in first
