"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd's of Debian's packages, in one folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from several_nodes import free_ports

from megalaunch.launch.process import descendants, kill_all

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

# 22.05 and later; cred_expire shortens the delay of two minutes before a requeued job starts again.
_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/state/slurmctld.pid
SlurmdPidFile={folder}/spool/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SlurmdTimeout=10
KillWait=2
ReturnToService=2
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=10 State=UP
"""


@contextmanager
def mini_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start the cluster; yield the variables with which Slurm's commands find it. Nothing of it is left.

    The test is skipped where Slurm is not installed or this user may not run it.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm of its own needs root, and {', '.join(missing) or 'Slurm'}")
    for name in ("munge", "state", "spool/n1", "spool/n2", "log"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o700)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    first = free_ports()
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(_CONF.format(host=host, folder=folder, port=free_ports(), first=first, second=first + 1))
    variables = {"SLURM_CONF": str(conf), "PATH": _path()}
    environment = {**os.environ, **variables}
    munge = [f"--key-file={key}", *(f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed"))]
    commands = (
        ["munged", "--foreground", "--force", f"--socket={folder}/munge/sock", *munge],
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        ["slurmd", "-D", "-f", str(conf), "-N", "n1"],
        ["slurmd", "-D", "-f", str(conf), "-N", "n2"],
    )
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environment, start_new_session=True, **quiet))
            if command[0] == "munged":
                _wait_for((folder / "munge/sock").exists)
        _wait_for(lambda: _idle_nodes(environment) == 2)
        yield variables
    finally:
        for daemon in reversed(daemons):
            left = descendants(daemon.pid)
            daemon.kill()
            daemon.wait()
            kill_all(left, 5)


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _idle_nodes(environment: dict[str, str]) -> int:
    sinfo = ["sinfo", "--noheader", "--Node", "--format=%T"]
    shown = subprocess.run(sinfo, env=environment, capture_output=True, text=True)
    return shown.stdout.split().count("idle")


def _wait_for(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the Slurm of this test did not start"
        time.sleep(0.1)
