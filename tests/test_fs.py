"""Atomic files and directories, locks and syncs: content is on disk before its name, a failed write changes nothing."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
from launching import tiny_spec

from megalaunch.data.cached_directory import cached_directory
from megalaunch.fs import (
    AtomicFile,
    atomic_file,
    create_temporary_directory,
    list_temporary_directories,
    lock_file,
    publish_directory,
    remove_directory,
    reserve_space,
    sync_tree,
    write_file_atomically,
)
from megalaunch.rundir import jsonl, outcome
from megalaunch.schema.spec_file import write_spec


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """Return the list of syncs and renames, by name, in order."""
    seen: list[str] = []
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def noted(descriptor: int) -> None:
        seen.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    for name, real in (("replace", replace), ("rename", rename)):

        def moved(self: Path, target: Path, real=real) -> Path:
            seen.append(f"name {Path(target).name}")
            return real(self, target)

        monkeypatch.setattr(Path, name, moved)
    return seen


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("spec.yaml", lambda path: write_spec(tiny_spec(), path)),
        ("results.csv", lambda path: write_file_atomically(path, "a,b\n")),
        ("outcome.json", lambda path: outcome.write_outcome(path, outcome.Outcome(0, "done", 1))),
        ("metrics.jsonl", lambda path: (path.write_text("{}\n{}\n{"), jsonl.keep_lines(path, lambda line: True))),
    ],
)
def test_content_is_synced_before_the_rename_and_the_directory_after(tmp_path, order, name, write):
    write(tmp_path / name)
    assert order == [f"sync .{name}.unfinished", f"name {name}", f"sync {tmp_path.name}"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("old")

    def write() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.yaml"]


def test_a_temporary_file_of_a_killed_writer_is_replaced_and_a_link_is_not_followed(tmp_path):
    path, victim = tmp_path / "spec.yaml", tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".spec.yaml.unfinished").symlink_to(victim)
    write_file_atomically(path, "new")
    assert (path.read_text(), victim.read_text()) == ("new", "untouched")


def test_a_cached_directory_is_on_disk_before_it_is_renamed(tmp_path, order):
    def build(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "order.npy").write_bytes(b"1234")

    cached_directory(tmp_path, "key", build, lambda found: found.exists(), lambda: None)
    assert order.index("sync order.npy") < order.index("sync inner") < order.index("name key")
    assert order[-1] == f"sync {tmp_path.name}"


def test_a_tree_that_cannot_be_walked_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "missing")


def test_a_second_writer_of_a_locked_file_is_refused(tmp_path):
    path = tmp_path / "x.bin"
    first = AtomicFile(path, leftover="lock")
    first.file.write(b"first")
    with pytest.raises(BlockingIOError, match="another process holds its lock"):
        AtomicFile(path, leftover="lock")
    first.sync()
    first.publish()
    assert path.read_bytes() == b"first"
    (tmp_path / ".x.bin.unfinished").write_bytes(b"left by a killed writer")
    write_file_atomically(path, "second", leftover="lock")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("x.bin", "second")]


@pytest.mark.parametrize("content", ["short", "longer than the reserved space"])
def test_reserved_space_is_written_in_place(tmp_path, content):
    path = tmp_path / "outcome.json"
    reserve_space(path, 10)
    inode = (tmp_path / ".outcome.json.unfinished").stat().st_ino
    write_file_atomically(path, content, leftover="reuse")
    assert (path.read_text(), path.stat().st_ino) == (content, inode)


def test_without_sync_the_file_is_only_renamed(tmp_path, order):
    write_file_atomically(tmp_path / "trace.json", "{}", sync=False)
    assert order == ["name trace.json"]


def test_a_lock_is_waited_for_when_the_caller_wants_it(tmp_path):
    path, calls = tmp_path / "lock", []
    held = lock_file(path)
    with pytest.raises(BlockingIOError):
        lock_file(path)

    def release() -> None:
        calls.append("waiting")
        os.close(held)

    os.close(lock_file(path, waiting=release))
    assert calls == ["waiting"]


@pytest.mark.parametrize("has_exchange", [True, False])
def test_a_published_directory_replaces_the_old_one(tmp_path, monkeypatch, has_exchange):
    if not has_exchange:
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a system without renameat2
    directory = tmp_path / "key"
    for content in ("old", "new"):
        temporary = create_temporary_directory(directory)
        assert list_temporary_directories(tmp_path, "key") == [temporary]
        (temporary / "file").write_text(content)
        publish_directory(temporary, directory)
        assert (directory / "file").read_text() == content
        assert list(tmp_path.iterdir()) == [directory]
    remove_directory(directory)
    assert list(tmp_path.iterdir()) == []
