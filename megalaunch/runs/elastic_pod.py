"""Take part in a run as one of its pods, of which it may have fewer."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import typer

from megalaunch.launchers.kubernetes.elastic_pod import take_part
from megalaunch.launchers.kubernetes.pod import NODE_VARIABLE
from megalaunch.launchers.kubernetes.pod_channel import Pod
from megalaunch.runs.errors import fail
from megalaunch.runs.submit import training_job

if TYPE_CHECKING:
    from megalaunch.launch.stop import StopSignals
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.prepare_run import PreparedRun


def run_pod(planned: PreparedRun, stop: StopSignals) -> ExitCode:
    """Take part in a run that may have fewer pods; return the exit code of this one."""
    allocation = planned.machine.allocation
    assert allocation is not None, "start_of saw a pod"
    assert allocation.place is not None, "start_of saw its place"
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        fail(f"the host name of this pod, {name}, cannot be resolved ({error.strerror})")
    pod = Pod(allocation.place.rank, os.environ.get(NODE_VARIABLE, name), address)

    def say(line: str) -> None:
        typer.echo(f"megalaunch: {line}", err=True)

    return take_part(training_job(planned), pod, allocation.place.port, stop, say)
