"""Files of a run directory are written through no link that somebody planted, and are not for other users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import tiny_spec

from megalaunch.fs import make_directory
from megalaunch.launch.agent import Agent
from megalaunch.launch.directory import RunDirectoryError, create_folders, lock_run
from megalaunch.launch.local import record_overrides
from megalaunch.launch.lock import RunLock
from megalaunch.rundir.collective_trace import CollectiveTrace, write_collective_trace
from megalaunch.rundir.events import record_event
from megalaunch.rundir.expert_load import append_expert_load
from megalaunch.rundir.fence import Fence
from megalaunch.rundir.jsonl import append_line, keep_lines, read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, reserve_outcome_space, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter
from megalaunch.rundir.rendezvous import keep_credentials
from megalaunch.schema.spec_file import write_spec

REDIRECT_OUTPUT = (
    "from pathlib import Path\nfrom megalaunch.engine.worker_setup import redirect_output\nredirect_output(Path({!r}))"
)


def redirect_output(log: Path) -> None:
    """In a process of its own, whose output it takes."""
    done = subprocess.run([sys.executable, "-c", REDIRECT_OUTPUT.format(str(log))], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.splitlines()[-1])


def agent(log: Path) -> None:
    Agent(["true"], os.environ, log).kill_tree()


# What writes each file, and whether it replaces what has the name (then a link itself goes) or refuses a link.
WRITERS = {
    "lock": (lambda run: RunLock(run.lock), "refuses"),
    "overrides.txt": (lambda run: record_overrides(run, ["a", "b c"]), "refuses"),
    "metrics.jsonl": (lambda run: append_line(run.metrics, {"step": 1}), "refuses"),
    "experts.bin": (lambda run: append_expert_load(run.expert_load, 1, [0], np.ones((1, 2))), "refuses"),
    "events.jsonl": (lambda run: record_event(run, "note", message="x"), "refuses"),
    "attempts.jsonl": (lambda run: Fence(run.attempts).claim(), "refuses"),
    "logs/agent.log": (lambda run: agent(run.agent_log), "refuses"),
    "logs/rank_0.log": (lambda run: redirect_output(run.rank_log(0)), "refuses"),
    "logs/rank_0.progress.json": (lambda run: ProgressWriter(run.progress(0), 0, 0).report("step", 1), "refuses"),
    "logs/rank_0.collectives.json": (
        lambda run: write_collective_trace(run.collective_trace(0), CollectiveTrace(0, 0.0, "", False, ())),
        "replaces",
    ),
    "logs/.rank_0.collectives.json.unfinished": (
        lambda run: write_collective_trace(run.collective_trace(0), CollectiveTrace(0, 0.0, "", False, ())),
        "replaces",
    ),
    "outcome.json": (lambda run: write_outcome(run.outcome, Outcome(ExitCode.DONE, "", 1)), "replaces"),
    ".outcome.json.unfinished": (lambda run: reserve_outcome_space(run.outcome), "replaces"),
    ".outcome.json.unfinished ": (lambda run: write_outcome(run.outcome, Outcome(0, "", 1)), "refuses"),
    "spec.yaml": (lambda run: write_spec(tiny_spec(), run.spec), "replaces"),
    ".spec.yaml.unfinished": (lambda run: write_spec(tiny_spec(), run.spec), "replaces"),
    "rendezvous.json": (lambda run: keep_credentials(run.rendezvous), "replaces"),
}


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    os.umask(0o022)
    directory.root.mkdir()
    create_folders(directory)
    return directory


@pytest.mark.parametrize("kind", ["to a file", "to nothing", "fifo"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_planted_link_is_not_written_through(run, tmp_path, name, kind):
    write, does = WRITERS[name]
    path, victim = run.root / name.strip(), tmp_path / "victim"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    if kind == "to a file":
        victim.write_text("precious\n")
    if does == "refuses":
        with pytest.raises(OSError):
            write(run)
    else:
        write(run)
        assert not run.outcome.is_symlink() if "outcome" in name else not path.is_symlink()
    assert victim.exists() == (kind == "to a file")
    if victim.exists():
        assert victim.read_text() == "precious\n"


def test_lines_are_truncated_without_following_a_link(run, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text('{"step": 1}\n')
    run.metrics.symlink_to(victim)
    keep_lines(run.metrics, lambda record: False)
    assert victim.read_text() == '{"step": 1}\n'
    assert not run.metrics.is_symlink()


def test_the_error_names_the_link(run, tmp_path):
    run.lock.symlink_to(tmp_path / "victim")
    with pytest.raises(RunDirectoryError) as caught:
        lock_run(run)
    assert str(caught.value) == f"{run.lock} cannot be written (is a symbolic link, which is not followed)"
    assert "remove it" in caught.value.fix


@pytest.mark.parametrize(("umask", "file_mode", "directory_mode"), [(0o022, 0o640, 0o750), (0o077, 0o600, 0o700)])
def test_files_are_not_readable_by_other_users(tmp_path, umask, file_mode, directory_mode):
    directory = RunDirectory(tmp_path / "run")
    before = os.umask(umask)
    try:
        lock = lock_run(directory)
        create_folders(directory)
        for name, (write, _) in WRITERS.items():
            if name != "lock":
                write(directory)
    finally:
        os.umask(before)
    modes = {path.relative_to(directory.root).as_posix(): path.stat().st_mode & 0o777 for path in tree(directory.root)}
    assert modes.pop("rendezvous.json") == 0o600
    folders = {".", "logs", "checkpoints", "plots"}
    assert {
        name: mode for name, mode in modes.items() if mode != (directory_mode if name in folders else file_mode)
    } == {}
    lock.release()


def tree(root: Path) -> list[Path]:
    return [root, *root.rglob("*")]


def test_directories_behind_links(tmp_path, monkeypatch):
    """A link of one's own to a larger disk is a choice; one of another user leads where they want."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "checkpoints"
    link.symlink_to(elsewhere)
    make_directory(link)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OSError, match="is a symbolic link that another user made"):
        make_directory(link)


def test_an_incomplete_line_does_not_corrupt_the_next(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    append_line(metrics, {"step": 1})
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 2, "lo')  # a writer was killed, or the disk was full
    append_line(metrics, {"step": 2})
    append_line(metrics, {"step": 3})
    assert [line["step"] for line in read_lines(metrics)] == [1, 2, 3]
    assert keep_lines(metrics, lambda line: line["step"] < 3) == 2  # the torn one and step 3
