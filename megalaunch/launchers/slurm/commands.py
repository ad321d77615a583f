"""Call Slurm's commands, and read what they say about a job, with or without its accounting."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

from megalaunch.launchers.launcher import JobStatus, LauncherError, Phase
from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.rundir.paths import RunDirectory

_TIMEOUT = 60.0  # seconds; a busy controller answers late
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
_WITHOUT_REASON = ("None", "")
_UNKNOWN_JOB = "Invalid job id"


def slurm_command(*command: str) -> str:
    """Run one of Slurm's commands; return its standard output, or its messages if it has none.

    Raises:
        LauncherError: it is not installed, fails or does not answer.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT)
    except FileNotFoundError:
        raise LauncherError(
            f"{command[0]} is not found, so that this machine has no Slurm",
            "type the command on a login node of the cluster, or set launcher=local",
        ) from None
    except subprocess.TimeoutExpired:
        message = f"{command[0]} did not answer in {_TIMEOUT:.0f} s"
        raise LauncherError(message, "try again when Slurm answers") from None
    except OSError as error:
        raise LauncherError(f"{command[0]} does not work: {error}") from error
    if done.returncode != 0:
        raise LauncherError(_reason(command[0], done.stderr or done.stdout))
    return done.stdout or done.stderr


def _reason(program: str, text: str) -> str:
    """Return Slurm's own reason, without the words before it on each line: `sbatch: error: `."""
    lines = [re.sub(rf"^{program}: (?:error: )?", "", line).strip() for line in text.splitlines()]
    return f"{program}: {'; '.join(line for line in lines if line) or 'failed without a message'}"


def check_script(script: Path) -> str:
    """Let Slurm check a batch script without submitting it; return when it would start. Raises LauncherError."""
    return _reason("sbatch", slurm_command("sbatch", "--test-only", str(script)))


def submit_script(script: Path, *options: str) -> int:
    """Submit a batch script; return the number of the job. Raises LauncherError."""
    answer = slurm_command("sbatch", "--parsable", *options, str(script))
    number = answer.strip().splitlines()[-1].partition(";")[0] if answer.strip() else ""
    if not number.isdecimal():
        raise LauncherError(f"sbatch answered {answer.strip()!r} in place of a job's number")
    return int(number)


def write_or_cancel(directory: RunDirectory, record: JobRecord) -> None:
    """Write the record of jobs that were submitted; cancel them if that fails, as nothing would show or stop them.

    Raises:
        OSError: the record cannot be written.
        LauncherError: the jobs cannot be cancelled either.
    """
    try:
        write_record(directory.job, record)
    except BaseException:
        slurm_command("scancel", *dict.fromkeys(str(number) for number in (record.id, record.final) if number))
        raise


def job_status(number: int) -> JobStatus:
    """Return the state of a job: from the controller, which forgets a job minutes after its end, else from sacct.

    Raises:
        LauncherError: Slurm does not answer.
    """
    shown = shown_jobs(number)
    if shown:
        return replace(shown[0], exit_code=None)  # of several nodes it is the largest, and not that of the run
    try:
        return _accounted_job(slurm_command(*_SACCT, f"--jobs={number}"))
    except LauncherError:  # a cluster without accounting
        return JobStatus("forgotten", "not known to Slurm any more")


def shown_jobs(number: int) -> list[JobStatus]:
    """Return the state of a job, or of each task of a job array, from the controller; [] if it has forgotten them.

    Raises:
        LauncherError: Slurm does not answer.
    """
    try:
        text = slurm_command("scontrol", "--oneliner", "show", "job", str(number))
    except LauncherError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        return []
    return [_shown_job(line) for line in text.splitlines() if line.strip()]


_SACCT = ("sacct", "--allocations", "--noheader", "--parsable2", "--format=State,NodeList")


def _shown_job(text: str) -> JobStatus:
    """Read a line of `scontrol --oneliner show job`: blanks separate KEY=VALUE."""
    fields = dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", text))
    state, reason = fields.get("JobState", "UNKNOWN"), fields.get("Reason", "")
    nodes = fields.get("NodeList", "")
    restarts, phase = fields.get("Restarts", "0"), _phase(state)
    code = fields.get("ExitCode", "").partition(":")[0]
    return JobStatus(
        phase,
        state,
        "" if reason in _WITHOUT_REASON else reason,
        "" if nodes == "(null)" else nodes,
        int(restarts) if restarts.isdecimal() else 0,
        int(code) if code.isdecimal() and phase == "ended" else None,
    )


def _accounted_job(text: str) -> JobStatus:
    """Read a line of sacct: `CANCELLED by 1000|n[1-2]`."""
    state, _, nodes = text.strip().partition("|")
    word = state.partition(" ")[0]
    if not word:
        return JobStatus("forgotten", "not known to Slurm any more")
    return JobStatus(_phase(word), state, nodes="" if nodes == "None assigned" else nodes)


def _phase(state: str) -> Phase:
    return "pending" if state in _PENDING else "running" if state in _RUNNING else "ended"
