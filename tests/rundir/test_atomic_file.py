"""Files that are replaced as a whole: on disk before they have their name, the old one stays when writing fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import tiny_spec

from megalaunch.config.spec_file import write_spec
from megalaunch.data.cached_directory import cached_directory
from megalaunch.rundir import jsonl, outcome
from megalaunch.rundir.atomic_file import atomic_file, sync_tree, write_file_atomically
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """What is synced and renamed, by name, in order."""
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
def test_the_content_is_on_disk_before_the_name_and_the_name_after(tmp_path, order, name, write):
    write(tmp_path / name)
    assert order == [f"sync .{name}.unfinished", f"name {name}", f"sync {tmp_path.name}"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_what_was_there(tmp_path):
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


def test_what_a_killed_writer_left_is_replaced_and_a_link_is_not_followed(tmp_path):
    path, victim = tmp_path / "spec.yaml", tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / ".spec.yaml.unfinished").symlink_to(victim)
    write_file_atomically(path, "new")
    assert (path.read_text(), victim.read_text()) == ("new", "untouched")


def test_a_cached_folder_is_on_disk_before_it_has_its_name(tmp_path, order):
    def build(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "order.npy").write_bytes(b"1234")

    cached_directory(tmp_path, "key", build, lambda found: found.exists(), lambda: None)
    assert order.index("sync order.npy") < order.index("sync inner") < order.index("name key")
    assert order[-1] == f"sync {tmp_path.name}"


def test_a_tree_that_cannot_be_walked_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "missing")


def test_an_empty_spec_file_does_not_block_a_resume(tmp_path):
    from megalaunch.launch.directory import RunDirectoryError, inspect_run

    directory = RunDirectory(tmp_path)
    directory.metrics.write_text('{"step": 1}\n')
    for step, name in ((4, "older"), (8, "newest")):
        directory.checkpoint(step).mkdir(parents=True)
        write_spec(tiny_spec(run__name=name), directory.checkpoint(step) / "spec.yaml")
    for content in (b"", b"\0" * 900):
        directory.spec.write_bytes(content)
        assert inspect_run(directory).stored == tiny_spec(run__name="newest")
    directory.spec.unlink()
    assert inspect_run(directory).stored == tiny_spec(run__name="newest")
    (directory.checkpoint(8) / "spec.yaml").write_bytes(b"")
    assert inspect_run(directory).stored == tiny_spec(run__name="older")
    (directory.checkpoint(4) / "spec.yaml").unlink()
    directory.spec.write_bytes(b"")
    with pytest.raises(RunDirectoryError, match=r"spec\.yaml is empty, and no checkpoint holds a copy"):
        inspect_run(directory)
