"""Independent tasks as a job array of Slurm, and a job that runs their final command when all of them have ended."""

from __future__ import annotations

import shlex
import socket
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.launchers.launcher import JobStatus
from megalaunch.launchers.record import JobRecord
from megalaunch.launchers.slurm.batch_script import OUTPUT, command, script_text
from megalaunch.launchers.slurm.commands import (
    check_script,
    job_status,
    shown_jobs,
    slurm_command,
    submit_script,
    write_or_cancel,
)
from megalaunch.launchers.tasks import TaskSet, task_number
from megalaunch.rundir.paths import RunDirectory

_ARRAY_OUTPUT = "slurm-%A_%a.out"  # %A: the number of the array, %a: that of the task
_NUMBER = "SLURM_ARRAY_TASK_ID"
_AFTER = "--dependency=afterany:"  # a lost task is no reason to wait for ever: the final command does its work


class SlurmTasks:
    """Submits a job array and the job of the final command, which waits for all tasks."""

    attached: Literal[False] = False

    def manifest(self, tasks: TaskSet) -> str:
        """Return the two batch scripts, below the commands that submit them."""
        directory = RunDirectory(tasks.directory)
        array, final = shlex.quote(str(directory.batch_script)), shlex.quote(str(directory.final_script))
        if not tasks.numbers:
            return f"# sbatch {final}\n{_final_script(tasks)}"
        after = f"{_AFTER}<job of the array>"
        return f"# sbatch {array}\n{_array_script(tasks)}\n# sbatch {after} {final}\n{_final_script(tasks)}"

    def submit(self, tasks: TaskSet) -> JobRecord:
        """Check the scripts by `sbatch --test-only`, submit both and write their record; without tasks only the last.

        Raises:
            LauncherError: Slurm refuses one; none is left then.
        """
        directory = RunDirectory(tasks.directory)
        make_directory(directory.root)
        make_directory(directory.logs)  # Slurm fails a job whose output file it cannot open
        write_file_atomically(directory.final_script, _final_script(tasks))
        check_script(directory.final_script)
        if not tasks.numbers:
            number = submit_script(directory.final_script)
            return _record(tasks, directory, number, number)
        write_file_atomically(directory.batch_script, _array_script(tasks))
        check_script(directory.batch_script)
        array = submit_script(directory.batch_script)
        try:
            final = submit_script(directory.final_script, f"{_AFTER}{array}")
        except BaseException:
            slurm_command("scancel", str(array))
            raise
        return _record(tasks, directory, array, final)


def tasks_status(record: JobRecord) -> JobStatus:
    """Return the state of the final job, or of the tasks while it waits for them. Raises LauncherError."""
    number = int(record.final)
    final = next(iter(shown_jobs(number)), None) or job_status(number)
    if final.phase != "pending":
        return replace(final, reason=final.reason or f"final job {record.final}")
    states = shown_jobs(int(record.id))
    running = [state for state in states if state.phase == "running"]
    if running:
        nodes = ",".join(sorted({state.nodes for state in running}))
        return JobStatus("running", "RUNNING", f"{len(running)} of {record.tasks} tasks at once", nodes)
    waiting = [state for state in states if state.phase == "pending"]
    return waiting[0] if waiting else final


def stop_tasks(record: JobRecord, at_once: bool) -> str:
    """Cancel the final job and the waiting tasks; send SIGTERM to the running tasks. Raises LauncherError."""
    array, final = str(record.id), str(record.final)
    slurm_command("scancel", final)
    if shown_jobs(int(array)):  # scancel fails for a job that is forgotten
        ways = [[]] if at_once else [["--state=PENDING"], ["--signal=TERM"]]
        for way in ways:
            slurm_command("scancel", *way, array)
    return f"job {final} is cancelled, and the tasks of job {array} end; the same command continues"


def tasks_output(record: JobRecord) -> list[Path]:
    """Return the files with the output of each task and of the final command, as far as they exist."""
    pattern = Path(record.output)
    tasks = sorted(pattern.parent.glob(pattern.name), key=task_number)
    return [*tasks, *(path for path in [final_output(record)] if path.exists())]


def final_output(record: JobRecord) -> Path:
    """Return the file with the output of the final command."""
    return Path(record.output).with_name(OUTPUT.replace("%j", str(record.final)))


def _record(tasks: TaskSet, directory: RunDirectory, number: int, final: int) -> JobRecord:
    """Write the record of what was submitted; return it."""
    pattern = _ARRAY_OUTPUT.replace("%A", str(number)).replace("%a", "*")
    host, output = socket.gethostname(), str(directory.logs / pattern)
    count = len(tasks.numbers)
    record = JobRecord("slurm", number, tasks.name, 1, time.time(), host, output, tasks=count, final=final)
    write_or_cancel(directory, record)
    return record


def _array_script(tasks: TaskSet) -> str:
    job = tasks.job(tasks.arguments(_NUMBER))
    words = " ".join(f'"${_NUMBER}"' if word == _NUMBER else shlex.quote(word) for word in command(job))
    return script_text(job, RunDirectory(tasks.directory).logs / _ARRAY_OUTPUT, words, _ranges(tasks.numbers))


def _final_script(tasks: TaskSet) -> str:
    job = tasks.job(tasks.final)
    alone = replace(job, settings=replace(job.settings, slurm=replace(job.settings.slurm, dependency=None)))
    job = alone if tasks.numbers else job
    return script_text(job, RunDirectory(tasks.directory).logs / OUTPUT, shlex.join(command(job)))


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers in order as sbatch reads them: 0-3,7."""
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
