"""Jobs of Slurm: a batch script for each, kept in the directory of the work."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.launchers.launcher import Job, JobStatus
from megalaunch.launchers.record import JobRecord
from megalaunch.launchers.slurm.batch_script import OUTPUT, batch_script
from megalaunch.launchers.slurm.commands import check_script, job_status, slurm_command, submit_script, write_or_cancel
from megalaunch.launchers.slurm.srun_lines import stop_signal, takes_stop
from megalaunch.launchers.slurm.tasks import stop_tasks, tasks_output, tasks_status
from megalaunch.rundir.paths import RunDirectory

_STOP_TASKS = ("--signal=TERM",)


class SlurmLauncher:
    """Submits batch scripts; a job lives on without the process that submitted it."""

    attached = False

    def manifest(self, job: Job) -> str:
        """Return the batch script."""
        return batch_script(job, _output(job))

    def submit(self, job: Job) -> JobRecord:
        """Check the batch script by `sbatch --test-only`, submit it and write the record."""
        text, directory = self.manifest(job), RunDirectory(job.directory)
        make_directory(directory.root)
        make_directory(directory.logs)  # Slurm fails a job whose output file it cannot open
        write_file_atomically(directory.batch_script, text)
        check_script(directory.batch_script)
        number = submit_script(directory.batch_script)
        host, output = socket.gethostname(), str(directory.logs / OUTPUT.replace("%j", str(number)))
        stop = ("--batch", f"--signal={stop_signal(job.settings.slurm)}") if takes_stop(job) else ()
        record = JobRecord("slurm", number, job.name, job.nodes, time.time(), host, output, options=stop)
        write_or_cancel(directory, record)
        return record

    def status(self, record: JobRecord) -> JobStatus:
        """Ask Slurm for the state of a job."""
        if record.is_task_set:
            return tasks_status(record)
        return job_status(int(record.id))

    def stop(self, record: JobRecord, at_once: bool) -> str:
        """Cancel a pending job; let the tasks of a running one save: by its script, or by a signal to them."""
        if record.is_task_set:
            return stop_tasks(record, at_once)
        number = str(record.id)
        if at_once or self.status(record).phase != "running":
            slurm_command("scancel", number)
            return f"job {number} is cancelled"
        slurm_command("scancel", *(record.options or _STOP_TASKS), number)
        return f"job {number} saves a checkpoint and ends"

    def output(self, record: JobRecord) -> list[Path]:
        """Return the file with the output of the batch script and its tasks."""
        if record.is_task_set:
            return tasks_output(record)
        path = Path(record.output)
        return [path] if path.exists() else []

    def new_lines(self, record: JobRecord) -> list[str]:
        """Return nothing: the machine that submits a job sees its directory."""
        return []


def _output(job: Job) -> Path:
    return RunDirectory(job.directory).logs / OUTPUT
