"""A writer that is stopped in mid-save, and continues after a later attempt has saved, changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from megalaunch.engine.checkpoint.store import prune_checkpoints, read_tensors, save_checkpoint, verify_checkpoint
from megalaunch.rundir.fence import Fence, Superseded

SUPERSEDED = 75


def save(root: Path, fence: Fence, value: float, wrote=lambda done, total: None) -> None:
    tensors = {"model.weight": torch.full((64,), value)}
    save_checkpoint(root / "checkpoints" / "step_00000010", tensors, {}, {}, wrote=wrote, hold=fence.hold)


def save_and_stop(root: Path) -> int:
    """Save in another process, which stops itself once the tensors are written; its pid."""
    if child := os.fork():
        os.waitpid(child, os.WUNTRACED)
        return child
    code, stops = 1, [signal.SIGSTOP]

    def stop_once(done: int, total: int) -> None:
        if stops:
            os.kill(os.getpid(), stops.pop())

    try:
        fence = Fence(root / "attempts.jsonl")
        fence.claim()
        save(root, fence, 1.0, stop_once)
        code = 0
    except Superseded:
        code = SUPERSEDED
    finally:
        os._exit(code)


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and content."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_writer_that_was_stopped_in_mid_save_publishes_nothing(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    stale = save_and_stop(tmp_path)
    leftovers = set(checkpoints.iterdir())
    assert len(leftovers) == 1
    fence = Fence(tmp_path / "attempts.jsonl")
    fence.claim()
    save(tmp_path, fence, 2.0)
    saved = contents(checkpoints / "step_00000010")
    os.kill(stale, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(stale, 0)[1]) == SUPERSEDED
    assert contents(checkpoints) == saved  # and the stale one has removed what it had begun
    assert verify_checkpoint(checkpoints / "step_00000010") == []
    assert dict(read_tensors(checkpoints / "step_00000010"))["model.weight"].eq(2.0).all()


def test_a_writer_whose_leftovers_were_removed_brings_nothing_back(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    stale = save_and_stop(tmp_path)
    fence = Fence(tmp_path / "attempts.jsonl")
    fence.claim()
    save(tmp_path, fence, 2.0)
    prune_checkpoints(checkpoints, 1)
    saved = contents(checkpoints)
    os.kill(stale, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(stale, 0)[1]) in (1, SUPERSEDED)
    assert contents(checkpoints) == saved
