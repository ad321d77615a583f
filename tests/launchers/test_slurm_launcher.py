"""Jobs of a stand-in for Slurm: what is called, what its answers mean, and what the user sees of a run."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest
from fake_slurm import FakeSlurm
from launching import wait_until
from training import tiny_overrides
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import read_record
from megalaunch.launchers.select_launcher import select_launcher
from megalaunch.launchers.slurm import commands
from megalaunch.launchers.slurm.commands import job_status, submit_script
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line
from megalaunch.rundir.outcome import Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "slurm", sys.executable)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return fake


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train(folder, *more):
    return call("train", *tiny_overrides(folder, "launcher=slurm", "cluster.nodes=2", *more))


def test_a_job_whose_record_cannot_be_written_is_cancelled(slurm, tmp_path, monkeypatch):
    """Nothing would show it, nor stop it: the same command would submit another."""

    def write_record(path, record):
        raise OSError("No space left on device")

    monkeypatch.setattr(commands, "write_record", write_record)
    done = train(tmp_path)
    assert done.exit_code != 0
    assert slurm.calls[-1] == ["scancel", "12"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"JobState": "PENDING", "Reason": "Resources"}, JobStatus("pending", "PENDING", "Resources")),
        ({"JobState": "CONFIGURING", "NodeList": "n1"}, JobStatus("pending", "CONFIGURING", "", "n1")),
        ({"JobState": "RUNNING", "NodeList": "n[1-2]"}, JobStatus("running", "RUNNING", "", "n[1-2]")),
        ({"JobState": "COMPLETING", "Restarts": 2}, JobStatus("running", "COMPLETING", restarts=2)),
        ({"JobState": "OUT_OF_MEMORY"}, JobStatus("ended", "OUT_OF_MEMORY")),
    ],
)
def test_states(slurm, fields, status):
    slurm.job(fields.pop("JobState"), **fields)
    assert job_status(12) == status


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("CANCELLED by 1000|n[1-2]\n", JobStatus("ended", "CANCELLED by 1000", "", "n[1-2]")),
        ("PENDING|None assigned\n", JobStatus("pending", "PENDING")),
        ("", JobStatus("forgotten", "not known to Slurm any more")),
        (None, JobStatus("forgotten", "not known to Slurm any more")),
    ],
)
def test_a_job_that_the_controller_has_forgotten(slurm, answer, status):
    slurm.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    if answer is None:
        slurm.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    else:
        slurm.answer("sacct", answer)
    assert job_status(12) == status


def test_a_controller_that_does_not_answer_is_an_error(slurm):
    slurm.answer("scontrol", err="scontrol: error: Unable to contact slurm controller\n", code=1)
    with pytest.raises(LauncherError, match=r"^scontrol: Unable to contact slurm controller$"):
        job_status(12)


def test_what_sbatch_must_answer(slurm, tmp_path):
    slurm.answer("sbatch --parsable", "12;cluster\n")
    assert submit_script(tmp_path / "x") == 12
    slurm.answer("sbatch --parsable", "Submitted\n")
    with pytest.raises(LauncherError, match="sbatch answered 'Submitted' in place of a job's number"):
        submit_script(tmp_path / "x")


def test_there_is_no_other_launcher():
    with pytest.raises(LauncherError, match="no launcher 'local' for other machines"):
        select_launcher("local")


def test_without_slurm_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = train(tmp_path)
    assert done.exit_code == 2
    assert (
        "sbatch is not found, so that this machine has no Slurm\nfix:  type the command on a login node" in done.stderr
    )
    assert not RunDirectory(tmp_path / "run").job.exists()


def test_what_slurm_refuses_is_not_submitted(slurm, tmp_path):
    text = "sbatch: error: Batch job submission failed: Invalid account\n"
    slurm.answer("sbatch --test-only", err=text, code=1)
    done = train(tmp_path)
    assert done.exit_code == 2
    assert "error: sbatch: Batch job submission failed: Invalid account" in done.stderr
    assert [call[:2] for call in slurm.calls] == [["sbatch", "--test-only"]]
    slurm.answer("sbatch --test-only")  # the user repairs the account, and repeats the command
    slurm.job("COMPLETED")
    assert train(tmp_path, "--detach").exit_code == 0


def test_a_dry_run_prints_the_script_and_writes_nothing(slurm, tmp_path):
    done = train(tmp_path, "--dry-run")
    assert done.exit_code == 0, done.output
    _, script = done.stdout.split("\n\n", 1)
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=tiny\n#SBATCH --nodes=2\n")
    assert "cluster.devices_per_node=2" in script  # it was open, and is what the check assumed
    assert "--gpus-per-node" not in script
    assert slurm.calls == []
    assert not (tmp_path / "run").exists()
    assert train(tmp_path, "--detach").exit_code == 0
    assert RunDirectory(tmp_path / "run").batch_script.read_text() == script


def test_a_job_is_submitted_shown_and_stopped(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run")
    slurm.job("PENDING", Reason="Priority")
    done = train(tmp_path, "--detach")
    assert done.exit_code == 0, done.output
    assert "submitted job 12 to slurm: 2 nodes, output in run/logs/slurm-12.out" in done.stdout
    record = read_record(run.job)
    assert (record.id, record.launcher, record.nodes) == (12, "slurm", 2)

    assert "  state    PENDING (Priority)\n" in call("status", run.root).stdout
    row = json.loads(call("status", run.root, "--json").stdout)
    assert (row["job"]["id"], row["status"]["phase"], row["outcome"]) == (12, "pending", None)
    listed = call("list", tmp_path).stdout.splitlines()
    assert listed[0].endswith(": 1 job")
    assert listed[2].split()[:4] == ["run", "slurm", "12", "2"]
    again = train(tmp_path)
    assert again.exit_code == 2
    assert "has job 12 already: PENDING (Priority)" in again.stderr

    assert call("stop", run.root).stdout == "job 12 is cancelled\n"
    assert slurm.calls[-1] == ["scancel", "12"]
    slurm.job("RUNNING", NodeList="n[1-2]")
    assert call("stop", run.root).stdout == "job 12 saves a checkpoint and ends\n"
    assert slurm.calls[-1] == ["scancel", "--batch", "--signal=USR2", "12"]
    assert call("stop", run.root, "--now").stdout == "job 12 is cancelled\n"
    slurm.job("CANCELLED")
    refused = call("stop", run.root)
    assert refused.exit_code == 2
    assert "is not running: CANCELLED" in refused.stderr


def test_the_spare_nodes_of_a_job_are_told(slurm, tmp_path):
    slurm.job("PENDING")
    done = train(tmp_path, "launcher.slurm.spare_nodes=1", "--detach")
    assert "submitted job 12 to slurm: 2 nodes and 1 spare, output in run/logs/slurm-12.out" in done.stdout
    assert "#SBATCH --nodes=3\n" in RunDirectory(tmp_path / "run").batch_script.read_text()


def test_the_end_of_a_job_that_slurm_has_forgotten_is_that_of_its_run(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run")
    slurm.job("PENDING")
    assert train(tmp_path, "--detach").exit_code == 0
    slurm.answer("scontrol", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    slurm.answer("scontrol --oneliner show job 12", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    slurm.answer("sacct", err="Slurm accounting storage is disabled\n", code=1)
    assert "  state    not known to Slurm any more\n" in call("status", run.root).stdout
    write_outcome(run.outcome, Outcome(0, "finished all 20 steps", 20))
    told = "completed (exit code 0 by outcome.json; not known to Slurm any more)"
    shown = call("status", run.root).stdout
    assert f"  state    {told}\n" in shown
    assert "  outcome  finished all 20 steps (exit code 0)\n" in shown
    assert call("list", tmp_path).stdout.endswith(f"{told}\n")
    row = json.loads(call("status", run.root, "--json").stdout)
    assert (row["status"]["phase"], row["status"]["exit_code"], row["outcome"]["step"]) == ("ended", 0, 20)


def test_a_resumed_run_does_not_show_the_end_of_its_last_job(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert train(tmp_path, "--detach").exit_code == 0
    write_outcome(run.outcome, Outcome(75, "stopped by SIGTERM", 5))
    os.utime(run.outcome, times=(read_record(run.job).submitted - 1,) * 2)
    slurm.job("PENDING", Reason="Priority")
    shown = call("status", run.root).stdout
    assert "  state    PENDING (Priority)\n" in shown
    assert "outcome" not in shown
    slurm.job("CANCELLED")
    watched = call("watch", run.root)
    assert watched.exit_code == 75
    assert "job 12 ended without an outcome of the run: CANCELLED" in watched.stderr
    slurm.answer("scontrol --oneliner show job 12", err="scontrol: error: Unable to contact slurm controller\n", code=1)
    assert call("list", tmp_path).stdout.endswith("unknown (scontrol: Unable to contact slurm controller)\n")


def test_a_command_that_hangs_is_named_in_a_few_words(slurm, monkeypatch):
    (slurm.bin / "scontrol").write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(commands, "_TIMEOUT", 0.3)
    with pytest.raises(LauncherError, match=r"^scontrol did not answer in 0 s$"):
        job_status(12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["launcher.slurm.signal=USR2@120"], ["--batch", "--signal=USR1"]),
        (["launcher.slurm.requeue=false"], ["--batch", "--signal=USR2"]),
        (["launcher.slurm.requeue=false", "launcher.max_restarts=0"], ["--signal=TERM"]),
    ],
    ids=["another warning", "a script that restarts", "a script without traps"],
)
def test_a_stop_goes_to_a_script_that_takes_it(slurm, tmp_path, options, words):
    assert train(tmp_path, "--detach", *options).exit_code == 0
    script = RunDirectory(tmp_path / "run").batch_script.read_text()
    assert any(line.startswith("trap ") and "stopped=1" in line for line in script.splitlines()) == (len(words) == 2)
    slurm.job("RUNNING")
    assert call("stop", tmp_path / "run").exit_code == 0
    assert slurm.calls[-1] == ["scancel", *words, "12"]


def test_a_run_is_shown_until_its_job_ends(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run")
    slurm.job("PENDING", Reason="DependencyNeverSatisfied")

    def cluster():
        """Play the job: it waits, trains two steps, and ends."""
        wait_until(run.job.exists)
        wait_until(lambda: sum(call[0] == "scontrol" for call in slurm.calls) > 0)
        record_event(run, "launch", workers=4)
        for step in (1, 2):
            record = {"step": step, "loss": 3.0, "step_seconds": 0.1, "tokens_per_second": 100.0}
            append_line(run.metrics, record)
        slurm.job("COMPLETED", NodeList="n[1-2]")
        write_outcome(run.outcome, Outcome(0, "finished all 2 steps", 2))

    playing = threading.Thread(target=cluster)
    playing.start()
    done = train(tmp_path)
    playing.join()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "job 12: PENDING (DependencyNeverSatisfied)" in lines
    assert "job 12 does not start by itself in this state: DependencyNeverSatisfied" in lines
    assert any(line.startswith("step  2/") for line in lines)
    assert "job 12: COMPLETED (on n[1-2])" in lines
    assert "tiny: finished all 2 steps" in lines
    watched = call("watch", run.root)
    assert watched.exit_code == 0
    assert "tiny: finished all 2 steps" in watched.stdout


def test_a_job_that_ends_without_an_outcome_shows_its_output(slurm, tmp_path):
    run = RunDirectory(tmp_path / "run")
    assert train(tmp_path, "--detach").exit_code == 0
    (run.logs / "slurm-12.out").write_text("error: node 0 cannot listen\n")
    slurm.job("NODE_FAIL")
    watched = call("watch", run.root)
    assert watched.exit_code == 5
    assert "job 12 ended without an outcome of the run: NODE_FAIL" in watched.stderr
    assert "  | error: node 0 cannot listen" in watched.stderr
    assert call("logs", run.root).stdout == "error: node 0 cannot listen\n"
    assert call("logs", run.root, "--follow", "--lines", "0").stdout == ""
    refused = call("logs", run.root, "--rank", "3")
    assert refused.exit_code == 2
    assert "has no such log yet: NODE_FAIL" in refused.stderr
    slurm.job("CANCELLED")
    assert call("watch", run.root).exit_code == 75  # the same command resumes it


def test_what_is_no_run_has_no_job(tmp_path):
    for command in ("status", "logs", "stop"):
        done = call(command, tmp_path)
        assert done.exit_code == 2
        assert "is not a run directory: it has no spec.yaml and no job.json" in done.stderr
    assert call("list", tmp_path / "absent").exit_code == 2


def test_logs_of_a_run_without_a_job_say_where_the_output_is(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.spec.touch()
    assert f"{run.root} has no logs: it has not started here\n" in call("logs", run.root).stderr
    for path in (run.agent_log, run.rank_log(0), run.rank_log(1)):
        path.touch()
    empty, missing = call("logs", run.root), call("logs", run.root, "--rank", 5)
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert empty.stderr == f"{run.agent_log} is empty; the log of a rank: megalaunch logs {run.root} --rank N\n"
    assert missing.exit_code == 2
    assert missing.stderr == f"error: {run.root} has no log of rank 5; it has those of ranks 0 to 1\n"
    assert call("logs", run.root, "--rank", 1).stderr == f"{run.rank_log(1)} is empty\n"


def test_without_a_start_there_is_nothing_to_detach(tmp_path):
    done = call("train", *tiny_overrides(tmp_path), "--detach", "--prepare-only")
    assert done.exit_code == 2
    assert "--prepare-only starts nothing, so there is nothing to detach\nfix:  leave --detach out" in done.stderr


def test_no_secret_of_the_environment_is_written(slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-of-a-token")
    assert train(tmp_path, "--detach").exit_code == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if b"canary-of-a-token" in path.read_bytes()]
