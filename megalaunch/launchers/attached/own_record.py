"""The record of a job that ends with this process: it names this process."""

from __future__ import annotations

import os
import socket
import time

from megalaunch.fs import make_directory
from megalaunch.launchers.record import JobRecord, write_record
from megalaunch.process import find_process
from megalaunch.rundir.paths import RunDirectory


def own_record(launcher: str, name: str, nodes: int, output: str, tasks: int = 0) -> JobRecord:
    """Return the record of a job that this process holds; the arguments are fields of the record."""
    process = find_process(os.getpid())
    assert process is not None, "this process has an entry in /proc"
    host, now = socket.gethostname(), time.time()
    return JobRecord(launcher, process.pid, name, nodes, now, host, output, process.started, tasks=tasks)


def write_attached_record(directory: RunDirectory, record: JobRecord) -> None:
    """Write the record into a directory that may be new, with its folder of logs. Raises OSError."""
    make_directory(directory.root)
    make_directory(directory.logs)
    directory.command_log.unlink(missing_ok=True)  # of an earlier job
    write_record(directory.job, record)
