"""Independent tasks on a stand-in for Slurm: the scripts, what is submitted, and what its answers mean."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm

from megalaunch.launchers.launcher import JobStatus, LauncherError
from megalaunch.launchers.record import read_record
from megalaunch.launchers.select_launcher import select_launcher, select_task_launcher
from megalaunch.launchers.slurm import commands
from megalaunch.launchers.tasks import TaskSet
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path / "slurm", sys.executable)
    fake.answer("sbatch --parsable --dependency=afterany:12", "13\n")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    return fake


@pytest.fixture
def tasks(tmp_path):
    settings = LauncherSpec(name="slurm", slurm=SlurmSpec(partition="cpu", requeue=False, dependency="afterok:3"))
    where = tmp_path / "out_job", tmp_path
    final = ("preprocess", "it's.jsonl")
    return TaskSet("shards", ("preprocess", "--shard"), ("it's.jsonl",), (0, 1, 2, 5), final, *where, settings)


def submit(tasks):
    record = select_task_launcher(tasks.settings).submit(tasks)
    assert read_record(RunDirectory(tasks.directory).job) == record
    return record


def test_the_scripts_are_an_array_and_a_final_job(slurm, tasks):
    array, final = (
        select_task_launcher(tasks.settings).manifest(tasks).split("\n# sbatch --dependency=afterany:<job of the ")
    )
    assert array.startswith(f"# sbatch {tasks.directory}/job.sbatch\n#!/bin/bash\n#SBATCH --job-name=shards\n")
    assert "#SBATCH --array=0-2,5\n" in array
    assert "#SBATCH --dependency=afterok:3\n" in array
    assert f"#SBATCH --output={tasks.directory}/logs/slurm-%A_%a.out\n" in array
    python = f"{sys.executable} -m megalaunch preprocess"
    assert array.endswith(f"""--kill-on-bad-exit=1 {python} --shard "$SLURM_ARRAY_TASK_ID" 'it'"'"'s.jsonl'\n""")
    assert "--array" not in final
    assert "afterok" not in final
    assert final.endswith(f"""{python} 'it'"'"'s.jsonl'\n""")
    assert slurm.calls == []


def test_both_are_checked_and_submitted(slurm, tasks):
    record = submit(tasks)
    assert (record.id, record.final, record.tasks) == (12, 13, 4)
    scripts = f"{tasks.directory}/job.sbatch", f"{tasks.directory}/final.sbatch"
    assert slurm.calls == [
        ["sbatch", "--test-only", scripts[1]],
        ["sbatch", "--test-only", scripts[0]],
        ["sbatch", "--parsable", scripts[0]],
        ["sbatch", "--parsable", "--dependency=afterany:12", scripts[1]],
    ]


def test_without_tasks_only_the_final_job_is_submitted(slurm, tasks):
    record = submit(replace(tasks, numbers=()))
    assert (record.id, record.final, record.tasks) == (12, 12, 0)
    assert "afterok:3" in (tasks.directory / "final.sbatch").read_text()
    assert len(slurm.calls) == 2


def test_an_array_without_its_final_job_is_cancelled(slurm, tasks):
    slurm.answer("sbatch --parsable --dependency", err="sbatch: error: Batch job submission failed\n", code=1)
    slurm.answer("sbatch --parsable --dependency=afterany:12", err="sbatch: error: no more jobs\n", code=1)
    with pytest.raises(LauncherError, match="no more jobs"):
        submit(tasks)
    assert slurm.calls[-1] == ["scancel", "12"]
    assert not RunDirectory(tasks.directory).job.exists()


def test_tasks_whose_record_cannot_be_written_are_cancelled(slurm, tasks, monkeypatch):
    def write_record(path, record):
        raise OSError("No space left on device")

    monkeypatch.setattr(commands, "write_record", write_record)
    with pytest.raises(OSError, match="No space"):
        submit(tasks)
    assert slurm.calls[-1] == ["scancel", "12", "13"]


def shown(*states):
    return "".join(f"JobId=1 JobState={state} Reason=None Restarts=0 {more}\n" for state, more in states)


@pytest.mark.parametrize(
    ("array", "final", "status"),
    [
        ([("PENDING", "")], [("PENDING", "")], JobStatus("pending", "PENDING")),
        (
            [("RUNNING", "NodeList=n2"), ("RUNNING", "NodeList=n1"), ("PENDING", ""), ("COMPLETED", "NodeList=n1")],
            [("PENDING", "")],
            JobStatus("running", "RUNNING", "2 of 4 tasks at once", "n1,n2"),
        ),
        ([("FAILED", "")], [("RUNNING", "")], JobStatus("running", "RUNNING", "final job 13")),
        ([], [("COMPLETED", "ExitCode=0:0")], JobStatus("ended", "COMPLETED", "final job 13", exit_code=0)),
        ([], [("FAILED", "ExitCode=3:0")], JobStatus("ended", "FAILED", "final job 13", exit_code=3)),
    ],
)
def test_states(slurm, tasks, array, final, status):
    record = submit(tasks)
    slurm.answer("scontrol --oneliner show job 12", shown(*array))
    slurm.answer("scontrol --oneliner show job 13", shown(*final))
    assert select_launcher("slurm").status(record) == status


@pytest.mark.parametrize(
    ("now", "array"), [(True, [["12"]]), (False, [["--state=PENDING", "12"], ["--signal=TERM", "12"]])]
)
def test_stop_cancels_the_final_job_first(slurm, tasks, now, array):
    record = submit(tasks)
    slurm.answer("scontrol --oneliner show job 12", shown(("RUNNING", "")))
    said = select_launcher("slurm").stop(record, now)
    assert said == "job 13 is cancelled, and the tasks of job 12 end; the same command continues"
    cancelled = [call[1:] for call in slurm.calls if call[0] == "scancel"]
    assert cancelled == [["13"], *array]


def test_an_array_that_slurm_has_forgotten_needs_no_end(slurm, tasks):
    record = submit(tasks)
    slurm.answer("scontrol --oneliner show job 12", err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    select_launcher("slurm").stop(record, True)
    assert [call[1:] for call in slurm.calls if call[0] == "scancel"] == [["13"]]
