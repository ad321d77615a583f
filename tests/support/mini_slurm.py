"""A real Slurm of some nodes on this machine: munged, slurmctld and slurmd's of Debian's packages, in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_runs import parent_of, processes
from several_nodes import free_ports

from megalaunch.process import descendants, kill_all

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

# 22.05 and later; cred_expire shortens the delay of two minutes before a requeued job starts again, and MessageTimeout
# the ten seconds after which a node that was asked does not answer.
_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
SlurmctldPort={port}
FirstJobId={first_job}
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
SlurmdTimeout={down_after}
MessageTimeout=3
KillWait=2
ReturnToService=2
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000\n"
# Batch scripts let srun wait a minute for the launchers of other nodes, once one has ended. Only the first srun of
# launchers is impatient: on a busy machine the launchers of a run that ends well end more than a few seconds apart.
_IMPATIENT_SRUN = """\
#!/bin/sh
for word; do
    shift
    [ "$word" != --wait=60 ] || ! mkdir {folder}/has_waited 2>/dev/null || word=--wait={seconds}
    set -- "$@" "$word"
done
exec {srun} "$@"
"""
_JOBS = 25  # of one cluster at most
_CLUSTERS = 20  # at once: ports of runs repeat after 500 jobs
_QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@contextmanager
def mini_slurm(folder: Path, nodes: int = 2, down_after: int = 10, srun_waits: int = 60) -> Iterator[dict[str, str]]:
    """Start the cluster of nodes n1, n2, ...; yield the variables with which Slurm's commands find it.

    Nothing of it is left. The test is skipped where Slurm is not installed or this user may not run it.

    Args:
        down_after: seconds without an answer, after which a node is marked down.
        srun_waits: seconds for which the first srun of launchers waits for those of other nodes, once one has ended.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm of its own needs root, and {', '.join(missing) or 'Slurm'}")
    names = [f"n{number}" for number in range(1, nodes + 1)]
    for name in ("munge", "state", *(f"spool/{name}" for name in names), "log"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "munge").chmod(0o700)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    of_nodes = [_NODE.format(name=name, host=host, port=free_ports()) for name in names]
    reservation, first_job = _reserved_jobs()
    head = _CONF.format(host=host, folder=folder, port=free_ports(), first_job=first_job, down_after=down_after)
    conf.write_text(head + "".join(of_nodes))
    srun = folder / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(_IMPATIENT_SRUN.format(folder=folder, seconds=srun_waits, srun=shutil.which("srun", path=_path())))
    srun.chmod(0o755)
    variables = {"SLURM_CONF": str(conf), "PATH": f"{srun.parent}:{_path()}"}
    environment = {**os.environ, **variables}
    munge = [f"--key-file={key}", *(f"--{name}-file={folder}/munge/{name}" for name in ("pid", "log", "seed"))]
    commands = (
        ["munged", "--foreground", "--force", f"--socket={folder}/munge/sock", *munge],
        ["slurmctld", "-D", "-c", "-f", str(conf)],
        *(_slurmd(conf, name) for name in names),
    )
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=environment, start_new_session=True, **_QUIET))
            if command[0] == "munged":
                _wait_for((folder / "munge/sock").exists)
        _wait_for(lambda: _idle_nodes(environment) == nodes)
        yield variables
    except BaseException:
        _print_state(environment, folder / "log/slurmctld.log")  # with the failure, which pytest shows
        raise
    finally:
        for daemon in reversed(daemons):
            left = descendants(daemon.pid)
            daemon.kill()
            daemon.wait()
            kill_all(left, 5)
        reservation.close()


def lose_node(variables: dict[str, str], name: str) -> None:
    """Kill all that runs on a node, its slurmd first, as if its machine had lost its power."""
    conf = variables["SLURM_CONF"]
    slurmds = processes(*_slurmd(Path(conf), name))
    tasks = [pid for pid in processes("") if _environment(pid, "SLURMD_NODENAME", "SLURM_CONF") == [name, conf]]
    steps = {parent for pid in tasks if (parent := parent_of(pid)) in processes("slurmstepd")}
    for pid in (*slurmds, *steps, *tasks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def restarted_node(variables: dict[str, str], name: str) -> Iterator[None]:
    """Start the slurmd of a lost node again; nothing of it is left."""
    command = _slurmd(Path(variables["SLURM_CONF"]), name)
    daemon = subprocess.Popen(command, env={**os.environ, **variables}, start_new_session=True, **_QUIET)
    try:
        yield
    finally:
        left = descendants(daemon.pid)
        daemon.kill()
        daemon.wait()
        kill_all(left, 5)


def _slurmd(conf: Path, name: str) -> list[str]:
    return ["slurmd", "-D", "-f", str(conf), "-N", name]


def _environment(pid: int, *names: str) -> list[str | None]:
    """The values of some variables of a process."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    found = dict(entry.partition("=")[::2] for entry in entries)
    return [found.get(name) for name in names]


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _reserved_jobs() -> tuple[socket.socket, int]:
    """Reserve numbers for the jobs of one cluster: what holds them until it is closed, and the first of them.

    The port of a run follows from the number of its job. Runs of two clusters with the same number, both on this
    machine, would have the same port, and the second would end at its start.
    """
    holder = socket.socket(socket.AF_UNIX)
    for number in range(_CLUSTERS):
        with contextlib.suppress(OSError):  # another test, of any process, holds them
            holder.bind(f"\0mini_slurm_jobs_{number}")  # an abstract name, which ends with its process
            return holder, 1 + number * _JOBS
    raise RuntimeError(f"{_CLUSTERS} clusters run at once")


def _print_state(environment: dict[str, str], log: Path) -> None:
    """Print what Slurm says of its nodes and jobs, and the end of its log."""
    for what in ("nodes", "jobs"):
        show = ["timeout", "10", "scontrol", "show", what]
        done = subprocess.run(show, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr, sep="")
    if log.exists():
        print(*log.read_text(errors="replace").splitlines()[-40:], sep="\n")


def _idle_nodes(environment: dict[str, str]) -> int:
    sinfo = ["sinfo", "--noheader", "--Node", "--format=%T"]
    shown = subprocess.run(sinfo, env=environment, capture_output=True, text=True)
    return shown.stdout.split().count("idle")


def _wait_for(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the Slurm of this test did not start"
        time.sleep(0.1)
