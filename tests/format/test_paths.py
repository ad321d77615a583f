"""Paths as people read them."""

from __future__ import annotations

from pathlib import Path

from megalaunch.format.paths import display_path


def test_a_path_below_the_working_directory_is_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "runs/quickstart") == "runs/quickstart"
    assert display_path(str(tmp_path / "runs")) == "runs"


def test_other_paths_stay_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    for path in (tmp_path / "runs", tmp_path, tmp_path / "run", Path("runs/typed"), Path("/data/run")):
        assert display_path(path) == str(path)


def test_a_removed_working_directory_leaves_paths_absolute(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert display_path(tmp_path / "gone/run") == f"{tmp_path}/gone/run"
