"""Checkpoints of one process: every damage is found and named, a failed save leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_tensors import reference, require_reference
from slow_cases import slow_but

from megalaunch.engine.checkpoint import dcp_storage
from megalaunch.engine.checkpoint.store import (
    CheckpointError,
    latest_valid_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    read_document,
    read_tensors,
    save_checkpoint,
    verify_checkpoint,
)
from megalaunch.rundir.checkpoint import tensor_index
from megalaunch.rundir.checkpoint.manifest import VERSION, FileRecord, manifest_text


@pytest.fixture
def save(tmp_path: Path) -> Callable[[int], Path]:
    """Save the reference tensors as one step."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.write_bytes(b"any bytes \x00\xff")

    def save_step(step: int) -> Path:
        directory = tmp_path / "checkpoints" / f"step_{step:08d}"
        trainer = {"step": step, "rate": 0.1, "nested": {"list": [1, None, True]}, "text": "ä"}
        save_checkpoint(directory, reference(), {"trainer": trainer}, {"tokenizer.json": tokenizer})
        return directory

    return save_step


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_holds_all_and_nothing_else(save: Callable[[int], Path]):
    directory = save(5)
    assert names_in(directory) == [
        "manifest.json",
        "shard_00000.safetensors",
        "tensors.json",
        "tokenizer.json",
        "trainer.json",
    ]
    assert names_in(directory.parent) == [directory.name]
    assert (directory / "tokenizer.json").read_bytes() == b"any bytes \x00\xff"
    trainer = {"step": 5, "rate": 0.1, "nested": {"list": [1, None, True]}, "text": "ä"}
    assert read_document(directory, "trainer") == trainer
    require_reference(read_tensors(directory))
    assert set(read_tensors(directory, ["even", "step"])) == {"even", "step"}


def test_missing_things_are_named(save: Callable[[int], Path]):
    directory = save(5)
    with pytest.raises(CheckpointError, match="has no other"):
        read_tensors(directory, ["even", "other"])
    with pytest.raises(CheckpointError, match=r"cannot read .*other\.json: No such file"):
        read_document(directory, "other")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: tensors\.json is missing"):
        load_checkpoint(directory.parent, reference())
    assert verify_checkpoint(directory.parent) == ["manifest.json: is missing, so the checkpoint is incomplete"]


@pytest.mark.parametrize(
    "name", ["manifest.json", "shard_00000.safetensors", "tensors.json", "tokenizer.json", "trainer.json"]
)
def test_damage_in_any_file_is_found_and_named(save: Callable[[int], Path], name: str):
    path = save(5) / name
    good = path.read_bytes()
    for at in {*range(0, len(good), max(1, len(good) // 40)), len(good) - 1}:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        (problem,) = verify_checkpoint(path.parent)
        assert problem.startswith(f"{name}: ")
    for cut in (good[:-1], b""):
        path.write_bytes(cut)
        (problem,) = verify_checkpoint(path.parent)
        assert problem.startswith(f"{name}: ")
    path.unlink()
    (problem,) = verify_checkpoint(path.parent)
    assert problem.startswith(f"{name}: is missing")


def manifest(directory: Path, change: Callable[[dict], object]) -> list[str]:
    """Verify with another manifest whose own digest fits."""
    body = json.loads((directory / "manifest.json").read_text())
    del body["digest"]
    change(body)
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps({**body, "digest": digest}, indent=1) + "\n")
    return verify_checkpoint(directory)


def test_unknown_format_versions_and_foreign_paths_are_refused(save: Callable[[int], Path]):
    directory = save(5)
    assert manifest(directory, lambda body: body.update(note="a later writer's key")) == []
    (problem,) = manifest(directory, lambda body: body.update(version=VERSION + 1))
    assert problem == f"manifest.json: has the format 'megalaunch checkpoint' {VERSION + 1}; " + (
        f"'megalaunch checkpoint' {VERSION} is supported"
    )
    for name in ("../secret", "/etc/passwd", "a/b", ".hidden", ""):
        (directory / "manifest.json").write_text(manifest_text([FileRecord(name, 1, "0")]))
        (problem,) = verify_checkpoint(directory)
        assert problem.startswith("manifest.json: names a file outside")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda even: even["chunks"][0].update(file="../shard_00000.safetensors"), "invalid file name"),
        (lambda even: even["chunks"][0].update(offsets=[1, 0]), "has a chunk outside its shape"),
        (lambda even: even["chunks"][0].update(shape=[7, 6]), "cover it exactly once"),
        (lambda even: even["chunks"].append(even["chunks"][0]), "cover it exactly once"),
        (lambda even: even.update(shape=[8, -6]), "invalid shape"),
        (lambda even: even.update(shape=[2**40, 2**40]), "invalid shape"),
        (lambda even: even.update(dtype="F99"), "F99"),
        (lambda even: even.update(dtype="I32"), "contradicts"),
        (lambda even: even.update(chunks=3), "damaged"),
    ],
)
def test_nothing_in_the_tensor_index_is_believed(save: Callable[[int], Path], change: Callable, reason: str):
    path = save(5) / "tensors.json"
    tensor_index = json.loads(path.read_text())
    change(tensor_index["even"])
    path.write_text(json.dumps(tensor_index))
    with pytest.raises(CheckpointError, match=reason):
        read_tensors(path.parent)


def test_overlapping_parts_of_the_right_volume_are_refused(save: Callable[[int], Path]):
    path = save(5) / "tensors.json"
    tensor_index = json.loads(path.read_text())
    half = {"shape": [4, 6], "file": "shard_00000.safetensors"}
    tensor_index["even"]["chunks"] = [{"offsets": [0, 0], **half}, {"offsets": [2, 0], **half}]
    path.write_text(json.dumps(tensor_index))
    with pytest.raises(CheckpointError, match="cover it exactly once"):
        read_tensors(path.parent)


def test_the_newest_valid_one_is_used(save: Callable[[int], Path]):
    first, second, third = save(9), save(10), save(100_000_000 - 1)
    third.joinpath("trainer.json").unlink()
    second.joinpath("manifest.json").unlink()
    (third.parent / "step_12").mkdir()
    (third.parent / "notes.txt").write_text("not a checkpoint")
    refused: list[tuple[Path, list[str]]] = []
    assert latest_valid_checkpoint(third.parent, lambda path, problems: refused.append((path, problems))) == first
    assert refused == [
        (third, ["trainer.json: is missing"]),
        (second, ["manifest.json: is missing, so the checkpoint is incomplete"]),
    ]
    assert latest_valid_checkpoint(third.parent / "nowhere", lambda *_: None) is None


def test_old_ones_are_removed_but_never_the_newest_valid(save: Callable[[int], Path]):
    first, second, third, fourth = (save(step) for step in (1, 2, 3, 4))
    folder = first.parent
    (folder / ".unfinished-step_00000004-abcd").mkdir()
    assert prune_checkpoints(folder, 0) == []
    assert names_in(folder) == [path.name for path in (first, second, third, fourth)]
    assert prune_checkpoints(folder, 3, known_valid=fourth) == [first]
    for broken in (third, fourth):
        broken.joinpath("trainer.json").unlink()
    save(1)
    assert prune_checkpoints(folder, 2) == [first]  # the second is all that could be continued from
    assert names_in(folder) == [path.name for path in (second, third, fourth)]
    assert prune_checkpoints(folder, 2) == []


def test_those_of_every_nth_step_stay(save: Callable[[int], Path]):
    saved = [save(step) for step in (2, 3, 4, 5, 6)]
    folder = saved[0].parent
    assert prune_checkpoints(folder, 1, known_valid=saved[-1], keep_every=2) == [saved[3], saved[1]]
    assert names_in(folder) == [path.name for path in (saved[0], saved[2], saved[4])]


def test_a_step_may_be_saved_again(save: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch):
    directory = save(5)
    (directory / "shard_00000.safetensors").write_bytes(b"rotten")
    (directory.parent / ".unfinished-step_00000005-0123").mkdir()
    save(5)
    assert verify_checkpoint(directory) == []
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a system without renameat2
    (directory / "trainer.json").unlink()
    save(5)
    assert verify_checkpoint(directory) == []
    assert names_in(directory.parent) == [".unfinished-step_00000005-0123", "step_00000005"]


def test_programming_errors_are_found_before_anything_is_written(tmp_path: Path):
    directory = tmp_path / "step_00000001"
    with pytest.raises(ValueError, match="distinct plain names"):
        save_checkpoint(directory, {}, {"manifest": {}}, {})
    with pytest.raises(ValueError, match="distinct plain names"):
        save_checkpoint(directory, {}, {}, {"../out": tmp_path})
    with pytest.raises(ValueError, match="cannot be saved in a checkpoint: Tensor"):
        save_checkpoint(directory, {"x": torch.zeros(2, device="meta")}, {}, {})
    assert names_in(tmp_path) == []


def test_a_missing_file_to_copy_fails_the_save(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"cannot save .*: .*gone: No such file"):
        save_checkpoint(tmp_path / "step_00000001", reference(), {}, {"spec.yaml": tmp_path / "gone"})
    assert names_in(tmp_path) == []


def fail_write_after(monkeypatch: pytest.MonkeyPatch, limit: int, code: int) -> None:
    written = 0
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        nonlocal written
        if written + len(data) > limit:
            raise OSError(code, os.strerror(code))
        written += len(data)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("limit", [0, 500, 1200, 2200])
def test_a_disk_that_fills_up_leaves_the_old_checkpoint(
    save: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, limit: int
):
    old = [save(1), save(2)]
    fail_write_after(monkeypatch, limit, errno.ENOSPC)
    with pytest.raises(CheckpointError) as caught:
        save(3)
    message = str(caught.value)
    assert message.startswith(f"no space left for the checkpoint {old[0].parent / 'step_00000003'}: it needs ")
    assert "are free; free space on that disk (the oldest checkpoint there, step_00000001, takes " in message
    assert "a lower checkpoint.keep_last retains fewer" in message
    assert all(verify_checkpoint(directory) == [] for directory in old)
    assert names_in(old[0].parent) == [directory.name for directory in old]


def test_too_little_space_is_seen_before_writing(save: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dcp_storage, "free_bytes", lambda path: 100)
    with pytest.raises(CheckpointError, match=r"it needs \d+ B, 100 B are free; free \d+ B or more"):
        save(1)


def test_other_write_errors_name_their_cause(save: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch):
    directory = save(1)
    fail_write_after(monkeypatch, 0, errno.EFBIG)
    with pytest.raises(CheckpointError, match=r"exceeds the limit on file sizes .*ulimit"):
        save(2)
    fail_write_after(monkeypatch, 0, errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(2)
    assert names_in(directory.parent) == [directory.name]


def child_killed_at(point: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that kills itself at its `point`-th change of the disk; False: it ended before."""
    child = os.fork()
    if child == 0:
        left = point

        def counted(function: Callable) -> Callable:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for name in ("write", "fsync", "open", "mkdir", "rename"):
            setattr(os, name, counted(getattr(os, name)))
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("again", slow_but([False, True], False), ids=["a new step", "a step saved before"])
def test_kill_at_every_point_of_a_save(save: Callable[[int], Path], again: bool):
    torch.set_num_threads(1)  # forks must not inherit a pool
    old = save(1)
    new = save(2) if again else old.with_name("step_00000002")
    point = 0
    while child_killed_at(point, lambda: save(2)):
        assert verify_checkpoint(old) == []
        if again:
            assert verify_checkpoint(new) == []
        assert latest_valid_checkpoint(old.parent, lambda path, problems: pytest.fail(f"{path} {problems}")) in (
            old,
            new,
        )
        point += 1
    assert point > 20
    assert verify_checkpoint(new) == []
    prune_checkpoints(old.parent, 0)
    assert names_in(old.parent) == [old.name, new.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        save_checkpoint(disk / "step_00000001", {"x": torch.zeros(100_000)}, {}, {})
        big = {"x": torch.zeros(200_000)}
        with pytest.raises(CheckpointError, match=r"needs 800\.0 kB, \d+\.\d kB are free; free \d+\.\d kB or more"):
            save_checkpoint(disk / "step_00000002", big, {}, {})
        monkeypatch.setattr(dcp_storage, "free_bytes", lambda path: 10**12)  # as if others filled it meanwhile
        with pytest.raises(CheckpointError, match=r"needs 800\.0 kB, \d+\.\d kB are free; free \d+\.\d kB or more"):
            save_checkpoint(disk / "step_00000002", big, {}, {})
        assert names_in(disk) == ["step_00000001"]
        assert verify_checkpoint(disk / "step_00000001") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("position", "problem"),
    [
        ({"step": 5, "tokens": 1}, []),
        ({"step": 4, "tokens": 1}, ["position.json: is for step 4, but the directory is named step 5"]),
        ({"tokens": 1}, ["position.json: has no step"]),
        ([[]], ["position.json: has no step"]),
    ],
)
def test_the_name_of_a_checkpoint_is_held_against_its_position(tmp_path: Path, position, problem):
    directory = tmp_path / "step_00000005"
    save_checkpoint(directory, reference(), {"position": position}, {})
    assert verify_checkpoint(directory) == verify_checkpoint(directory, hashes=False) == problem
    found = latest_valid_checkpoint(tmp_path, lambda path, problems: None)
    assert found == (None if problem else directory)
    copy = directory.rename(tmp_path / "kept_for_later")
    assert verify_checkpoint(copy) == []  # a name of the user's own says nothing


@pytest.mark.parametrize(
    "files", [None, [], {"a": None}, {"a": {"size": 1e999, "sha256": "0"}}, {"a": {"size": "x"}}, "missing"]
)
def test_a_list_of_files_that_is_none_is_named(save: Callable[[int], Path], files: object):
    change = (lambda body: body.pop("files")) if files == "missing" else (lambda body: body.update(files=files))
    assert manifest(save(5), change) == ["manifest.json: is damaged (its list of files)"]


def test_parts_side_by_side_are_compared_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    """Rows, and below them columns: nothing overlaps, and a sweep along either dim meets all of the others."""
    count = 200
    rows = [{"offsets": [row, 0], "shape": [1, count], "file": "a"} for row in range(count)]
    columns = [{"offsets": [count, column], "shape": [1, 1], "file": "a"} for column in range(count)]
    entry = {"dtype": "F32", "shape": [count + 1, count], "chunks": rows + columns}
    assert len(tensor_index.stored_tensor("x", entry).chunks) == 2 * count
    monkeypatch.setattr(tensor_index, "_MOST_COMPARED", 10_000)
    with pytest.raises(ValueError, match="more adjacent chunks than any layout creates"):
        tensor_index.stored_tensor("x", entry)
