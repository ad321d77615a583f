"""Print the last lines of log files, and what is appended to them."""

from __future__ import annotations

import shlex
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megalaunch.format.paths import display_path
from megalaunch.launchers.select_launcher import select_launcher
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.job_states import RunJob, find_job

_POLL_SECONDS = 0.5
_ASK_SECONDS = 5.0


def log_files(job: RunJob, rank: int | None) -> list[Path]:
    """Return the log of a rank; without one the output of the job, or of the agent and the command of a run without."""
    if rank is not None:
        paths = [job.directory.rank_log(rank)]
    elif job.record is None:
        paths = [job.directory.agent_log, job.directory.command_log]
    else:
        paths = select_launcher(job.record.launcher).output(job.record)
    return [path for path in paths if path.exists()]


def missing_log_text(job: RunJob, rank: int | None) -> str:
    """Say why a log of a run does not exist, with what to do about it."""
    root = display_path(job.directory.root)
    ranks = [int(path.stem.removeprefix("rank_")) for path in job.directory.logs.glob("rank_*.log")]
    if rank is not None and ranks:
        return f"{root} has no log of rank {rank}; it has those of ranks {min(ranks)} to {max(ranks)}"
    if job.record is None and job.holder is None:
        return f"{root} has no logs: it has not started here"
    return f"{root} has no such log yet: {job.status}\nfix:  megalaunch status {root}"


def empty_logs_text(job: RunJob, rank: int | None, paths: Sequence[Path]) -> str:
    """Say that nothing was written to the logs; "" if something was."""
    if not paths or any(path.stat().st_size for path in paths):
        return ""
    named = ", ".join(map(display_path, paths)) + (" are empty" if len(paths) > 1 else " is empty")
    if rank is not None:
        return named
    return f"{named}; the log of a rank: megalaunch logs {shlex.quote(display_path(job.directory.root))} --rank N"


def print_last_lines(paths: Sequence[Path], count: int) -> None:
    """Print the last lines of each file, below its name if there are several."""
    for path in paths:
        if len(paths) > 1:
            print(f"==> {display_path(path)} <==")
        with path.open(encoding="utf-8", errors="replace") as file:
            sys.stdout.writelines(deque(file, maxlen=count))
    sys.stdout.flush()


def follow_logs(directory: RunDirectory, rank: int | None) -> None:
    """Print what is appended to the logs of a run, new files too, until it has ended."""
    job, asked = find_job(directory), time.monotonic()
    ends = {path: path.stat().st_size for path in log_files(job, rank)}
    while True:
        if time.monotonic() - asked >= _ASK_SECONDS:
            job, asked = find_job(directory), time.monotonic()
        for path in log_files(job, rank):
            ends[path] = _print_from(path, ends.get(path, 0))
        if job.status.phase not in ("pending", "running"):
            return
        time.sleep(_POLL_SECONDS)


def _print_from(path: Path, start: int) -> int:
    """Print a file from an offset; return its end."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            appended = file.read()
    except OSError:
        return start
    sys.stdout.write(appended.decode("utf-8", errors="replace"))
    sys.stdout.flush()
    return start + len(appended)
