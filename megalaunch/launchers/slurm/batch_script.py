"""Write the batch script of a job: the options of sbatch, and one task on each node by srun."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec

OUTPUT = "slurm-%j.out"  # %j: the number of the job
WITHOUT_GRES = "none"
_CONTAINER_PYTHON = "python3"


def srun_options(nodes: int) -> list[str]:
    """Return the options with which srun starts one launcher on each node; one that fails ends the others."""
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1"]


def batch_script(job: Job, output: Path) -> str:
    """Return the text of the script. Every value is quoted for the shell, or for sbatch.

    Args:
        output: pattern of the file for the job's output.

    Raises:
        LauncherError: a value has a control character, which no option can hold.
    """
    return script_text(job, output, shlex.join(command(job)))


def script_text(job: Job, output: Path, words: str, array: str | None = None) -> str:
    """Return the text of a script that runs `words`, quoted for the shell, once on each node.

    Args:
        output: pattern of the file for the job's output.
        array: numbers of the tasks of a job array, such as 0-3.
    """
    options = [f"#SBATCH {option}" for option in _options(job, output, array)]
    srun = shlex.join(["srun", *srun_options(job.nodes), *_task_options(job.settings.slurm)])
    return "\n".join(["#!/bin/bash", *options, "", *_run(f"{srun} {words}", job.settings.slurm)]) + "\n"


def _options(job: Job, output: Path, array: str | None) -> Iterator[str]:
    slurm = job.settings.slurm
    gres, devices = slurm.gres, job.devices_per_node
    valued = {
        "job-name": job.name,
        "array": array,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gres": gres if gres != WITHOUT_GRES else None,
        "gpus-per-node": str(devices) if gres is None and devices else None,
        "cpus-per-task": None if slurm.cpus_per_task is None else str(slurm.cpus_per_task),
        "mem": slurm.mem,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
        "dependency": slurm.dependency,
        "signal": f"B:{slurm.signal}" if _requeues(slurm) else slurm.signal,
        "chdir": str(job.working_directory),
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
        "open-mode": "append",
    }
    for name, value in valued.items():
        if value is not None:
            yield f"--{name}={_quoted(value)}"
    if slurm.exclusive:
        yield "--exclusive"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    for line in slurm.extra:
        yield _quoted(line)


def _quoted(value: str) -> str:
    """Quote for sbatch, which reads the options of a script as a shell does."""
    if not value.isprintable():
        raise LauncherError(f"{value!r} has a control character, which an option of sbatch cannot hold")
    return shlex.quote(value)


def _task_options(slurm: SlurmSpec) -> Iterator[str]:
    """Yield the options of srun that the job has for its tasks; those of the container are of the pyxis plug-in."""
    if slurm.cpus_per_task is not None:
        yield f"--cpus-per-task={slurm.cpus_per_task}"
    if slurm.container_image is not None:
        yield f"--container-image={slurm.container_image}"
    if slurm.container_mounts:
        yield f"--container-mounts={','.join(slurm.container_mounts)}"
    if slurm.container_workdir is not None:
        yield f"--container-workdir={slurm.container_workdir}"


def command(job: Job) -> list[str]:
    """Return the command line of a job's nodes."""
    return [node_python(job.settings), "-m", "megalaunch", *job.arguments]


def node_python(settings: LauncherSpec) -> str:
    """Return the Python of the nodes."""
    in_container = settings.slurm.container_image is not None
    return settings.python or (_CONTAINER_PYTHON if in_container else sys.executable)


def _run(srun: str, slurm: SlurmSpec) -> list[str]:
    """Return the lines that run srun, and queue the job again if the time limit has ended it.

    srun's own exit code does not tell, as it is the largest of all tasks: 75 of one that srun ended for another's
    failure. So the warning goes to this script, which remembers it and passes it to srun, and srun to all processes.
    """
    if not _requeues(slurm):
        return [srun]
    name = str(slurm.signal).partition("@")[0]
    may_restart = f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {slurm.max_requeues} ]'
    return [
        "warned=0",
        f'trap \'trap "" {name}; warned=1; kill -{name} "$srun"\' {name}  # the time limit is near: the workers save',
        f"{srun} &",
        "srun=$!",
        'wait "$srun"; code=$?',
        'if [ "$warned" = 1 ]; then  # the trap ended the wait; 127: srun had ended before',
        '    wait "$srun"; ended=$?; [ "$ended" -eq 127 ] || code=$ended',
        "fi",
        f'if [ "$warned" = 1 ] && [ "$code" -ne 0 ] && {may_restart}; then',
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile',
        "fi",
        'exit "$code"',
    ]


def _requeues(slurm: SlurmSpec) -> bool:
    return slurm.requeue and slurm.signal is not None and slurm.max_requeues > 0
