"""`megalaunch runs`: the list, the comparison and the cleaning of a folder's runs."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from local_shards import write_local_shard
from tiny_run import make_run, tiny_spec
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launch.lock import RunLock
from megalaunch.rundir.jsonl import append_line, read_last_lines, read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import write_spec

FAILED = Outcome(ExitCode.CRASH, "a worker crashed", 3)


def call(*arguments: object):
    return CliRunner().invoke(app, ["runs", *(str(argument) for argument in arguments)])


def record_steps(run: RunDirectory, steps: int, first_loss: float = 8.0, validate_every: int = 10) -> None:
    """Write the metrics of a run whose loss falls by 0.1 a step; the validation loss is 0.5 higher."""
    for step in range(1, steps + 1):
        loss = first_loss - 0.1 * step
        append_line(run.metrics, {"step": step, "loss": loss, "tokens": 64 * step, "tokens_per_second": 1000.0 + step})
        if step % validate_every == 0:
            append_line(run.metrics, {"step": step, "validation_loss": loss + 0.5})


def plain_run(root: Path, steps: int, outcome: Outcome | None = None, **values: object) -> RunDirectory:
    """A run directory of `train.steps=40` without checkpoints."""
    run = RunDirectory(root)
    run.checkpoints.mkdir(parents=True)
    write_spec(with_values(tiny_spec(), {"train.steps": 40, **values}), run.spec)
    record_steps(run, steps)
    if outcome is not None:
        write_outcome(run.outcome, outcome)
    return run


def states(folder: Path) -> dict[str, str]:
    return {Path(row["path"]).name: row["state"] for row in json.loads(call("list", folder, "--json").stdout)}


def test_the_state_of_each_run(tmp_path: Path):
    plain_run(tmp_path / "finished", 40, Outcome(ExitCode.DONE, "completed", 40))
    plain_run(tmp_path / "cut", 20, Outcome(ExitCode.DONE, "completed", 20))
    plain_run(tmp_path / "deep" / "down" / "stopped", 20, Outcome(ExitCode.PREEMPTED, "SIGTERM", 20))
    plain_run(tmp_path / "failed", 3, Outcome(ExitCode.NON_FINITE, "the loss of step 4 is nan", 3))
    plain_run(tmp_path / "ended", 3)
    plain_run(tmp_path / "new", 0)
    lock = RunLock(plain_run(tmp_path / "running", 5).lock)
    (plain_run(tmp_path / "unreadable", 5).spec).write_text("nonsense: [")
    plain_run(tmp_path / ".hidden", 5)
    try:
        assert states(tmp_path) == {
            "finished": "finished", "cut": "stopped", "stopped": "stopped", "failed": "failed", "ended": "ended",
            "new": "new", "running": "running", "unreadable": "unreadable",
        }  # fmt: skip
    finally:
        lock.release()
    lines = call("list", tmp_path).stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}: 8 runs, ")
    assert re.search(r"  validation  median tokens/s +size", lines[1])  # a run's summary prints the average instead
    assert "  failed: the loss of step 4 is nan" in lines
    assert any(line.startswith("  unreadable: ") for line in lines)
    [stopped] = [line.split() for line in lines if line.startswith("  deep/down/stopped ")]
    assert stopped[1:6] == ["stopped", "20/40", "6.9500", "6.5000", "1,010"]  # loss: the mean of 20 steps


def test_figures_of_a_long_run_come_from_the_end_of_its_metrics(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for step in range(100):
        append_line(path, {"step": step, "loss": 1.0})
    whole = list(read_lines(path))
    size = path.stat().st_size
    assert list(read_last_lines(path, size)) == whole
    line = size // 100
    for limit in (3 * line + 5, 4 * line - 1):  # within a line, and just after a line's first byte
        assert list(read_last_lines(path, limit)) == whole[-3:]
    with path.open("a") as file:
        file.write('{"step": 100')
    assert list(read_last_lines(path, 3 * line)) == whole[-2:]  # a line of a killed writer does not count
    assert list(read_last_lines(tmp_path / "missing", 10)) == []


def test_runs_are_compared_at_their_last_common_validation(tmp_path: Path):
    one = plain_run(tmp_path / "one", 40, Outcome(ExitCode.DONE, "completed", 40))
    two = plain_run(tmp_path / "two", 25, **{"optimizer.lr": 0.002, "run.name": "two"})
    lines = call("compare", one.root, two.root).stdout.splitlines()
    rows = [line.split() for line in lines if line]
    assert rows[0] == ["setting", str(one.root), str(two.root)]
    settings = [row[0] for row in rows[1 : rows.index(["figure", str(one.root), str(two.root)])]]
    assert settings == ["optimizer.lr"]
    assert ["last", "step", "40", "25"] in rows
    assert ["validation", "loss,", "last", "4.5000", "6.5000"] in rows
    assert ["validation", "loss,", "step", "20", "6.5000", "6.5000"] in rows
    assert ["tokens/s,", "median", "1,020", "1,013"] in rows
    found = json.loads(call("compare", one.root, two.root, "--json").stdout)
    assert (found["common_step"], found["common_losses"]) == (20, [6.5, 6.5])
    assert call("compare", one.root, one.root).stdout.startswith("The settings are the same.")


def test_a_comparison_refuses_what_is_no_run(tmp_path: Path):
    run = plain_run(tmp_path / "one", 1)
    assert "name two or more run directories" in call("compare", run.root).stderr
    missing = call("compare", run.root, tmp_path)
    assert (missing.exit_code, missing.stderr) == (
        2,
        f"error: {tmp_path} is not a run directory: it has no spec.yaml\n",
    )
    nowhere = call("list", tmp_path / "none")
    assert nowhere.exit_code == 2
    assert "none cannot be read (No such file or directory): name the folder that holds your runs\n" in nowhere.stderr


@pytest.fixture
def saved(tmp_path: Path) -> RunDirectory:
    """Checkpoints of the steps 10, 20, 30 and 40, every 20th retained; the newest is damaged; one interrupted save."""
    run = make_run(tmp_path / "saved", steps=(10, 20, 30, 40))
    write_spec(with_values(tiny_spec(), {"checkpoint.keep_every": 20}), run.spec)
    (run.checkpoint(40) / "shard_00000.safetensors").unlink()
    interrupted = run.checkpoints / ".unfinished-step_00000050-00ff"
    interrupted.mkdir()
    (interrupted / "shard_00000.safetensors").write_bytes(bytes(1500))
    return run


def left(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_cleaning_keeps_the_newest_complete_checkpoint(saved: RunDirectory):
    before = left(saved)
    listed = call("clean", saved.root.parent).stdout
    assert "step_00000010" in listed
    assert "1.5 kB  interrupted save" in listed
    assert listed.splitlines()[-1].endswith("would be removed; nothing was. Add --yes to remove.")
    assert left(saved) == before
    assert call("clean", saved.root, "--yes").stdout.splitlines()[-1].startswith("removed: 2 directories, ")
    assert left(saved) == ["step_00000020", "step_00000030", "step_00000040"]  # 30 is the newest complete one
    call("clean", saved.root, "--only-newest", "--yes")
    assert left(saved) == ["step_00000030", "step_00000040"]
    assert call("clean", saved.root, "--only-newest", "--yes").stdout == "There is nothing to remove.\n"


def test_cleaning_removes_local_checkpoints_that_are_no_newer(saved: RunDirectory, tmp_path: Path):
    """The newest complete checkpoint in the run directory is that of step 30."""
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    values = {"checkpoint.memory.path": str(memory), "checkpoint.local.path": str(disk), "cluster.devices_per_node": 1}
    write_spec(with_values(tiny_spec(), values), saved.spec)
    write_local_shard(memory, saved, 0, 32)
    write_local_shard(disk, saved, 0, 30)
    size = sum(row["local_size"] for row in json.loads(call("list", saved.root, "--json").stdout))
    assert size > 0
    assert any(
        line.endswith("kB of local checkpoints on this machine")
        for line in call("list", saved.root).output.splitlines()
    )
    call("clean", saved.root, "--yes")
    assert (len(list(memory.iterdir())), len(list(disk.iterdir()))) == (1, 0)
    assert "local checkpoints: up to step 32 (--local)" in call("clean", saved.root, "--local", "--yes").stdout
    assert list(memory.iterdir()) == []
    write_local_shard(memory, failed := plain_run(tmp_path / "failed", 3, FAILED, **values), 0, 2)
    assert call("clean", failed.root, "--failed", "--yes").stdout == "There is nothing to remove.\n"  # it can continue
    assert (
        call("clean", failed.root, "--failed", "--local", "--yes")
        .stdout.splitlines()[-1]
        .startswith("removed: 2 directories, ")
    )
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("key", ["checkpoint.load_pretrained", "checkpoint.branch_from"])
def test_cleaning_keeps_a_checkpoint_from_which_another_run_began(saved: RunDirectory, key: str):
    beginning = str(saved.checkpoint(10))
    plain_run(saved.root.with_name("follower"), 3, **{key: beginning})
    call("clean", saved.root.parent, "--yes")
    assert left(saved) == ["step_00000010", "step_00000020", "step_00000030", "step_00000040"]
    call("clean", saved.root.parent, "--keep", 2, "--yes")
    assert "step_00000010" in left(saved)


def test_cleaning_leaves_a_running_run_alone(saved: RunDirectory):
    before = left(saved)
    lock = RunLock(saved.lock)
    try:
        done = call("clean", saved.root, "--yes")
    finally:
        lock.release()
    assert done.stdout == f"  {saved.root}: is running, not touched\nThere is nothing to remove.\n"
    assert left(saved) == before


def test_a_run_that_starts_before_its_cleaning_is_named(saved: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    from megalaunch.runs.catalog import clean

    before = left(saved)
    monkeypatch.setattr(clean, "run_is_locked", lambda run: False)  # as a moment before the launch
    lock = RunLock(saved.lock)
    try:
        done = call("clean", saved.root, "--yes")
    finally:
        lock.release()
    assert done.exit_code == ExitCode.CHECKPOINT
    assert done.stderr.startswith(f"error: {saved.root} is in use by process ")
    assert left(saved) == before


def test_failed_runs_without_a_checkpoint_are_removed_on_request(tmp_path: Path):
    plain_run(tmp_path / "failed", 3, FAILED)
    plain_run(tmp_path / "stopped", 3, Outcome(ExitCode.INTERRUPTED, "Ctrl-C", 3))
    write_outcome(make_run(tmp_path / "saved", steps=(2,)).outcome, FAILED)
    call("clean", tmp_path, "--yes")
    assert len(states(tmp_path)) == 3
    assert "failed before its first checkpoint" in call("clean", tmp_path, "--failed").stdout
    call("clean", tmp_path, "--failed", "--yes")
    assert sorted(states(tmp_path)) == ["saved", "stopped"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "stopped"]


def test_the_list_ends_with_the_newest_run(tmp_path: Path):
    for age, name in ((100, "a"), (300, "b"), (200, "c")):
        run = plain_run(tmp_path / name, 1)
        for file in run.root.rglob("*"):
            os.utime(file, (time.time() - age,) * 2)
    lines = call("list", tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["b", "c", "a"]
