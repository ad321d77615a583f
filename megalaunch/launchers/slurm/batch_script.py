"""Write the batch script of a job: the options of sbatch, and one task on each node by srun."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.slurm.elastic_lines import ON_CHOSEN
from megalaunch.launchers.slurm.srun_lines import (
    chooses_nodes,
    lines_once,
    lines_with_restarts,
    requeues,
    restarts_by_script,
)
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec

OUTPUT = "slurm-%j.out"  # %j: the number of the job
WITHOUT_GRES = "none"
_CONTAINER_PYTHON = "python3"
_EACH_NODE = ("--ntasks-per-node=1", "--cpu-bind=none")
_END_TOGETHER = ("--kill-on-bad-exit=0", "--wait=60")  # seconds after the first launcher that has ended


def srun_options(nodes: int) -> list[str]:
    """Return the options with which srun starts one launcher on each node; one that fails ends the others."""
    return [*_one_task_a_node(nodes), "--kill-on-bad-exit=1"]


def _one_task_a_node(nodes: int) -> list[str]:
    return [f"--nodes={nodes}", f"--ntasks={nodes}", *_EACH_NODE]


def batch_script(job: Job, output: Path) -> str:
    """Return the text of the script. Every value is quoted for the shell, or for sbatch.

    Args:
        output: pattern of the file for the job's output.

    Raises:
        LauncherError: a value has a control character, which no option can hold.
    """
    words = {nodes: shlex.join(command(job.on_nodes(nodes))) for nodes in (job.nodes, *job.fewer)}
    if not restarts_by_script(job):
        return script_text(job, output, words[job.nodes])
    if chooses_nodes(job):
        srun = _srun(job, [*_EACH_NODE, *_END_TOGETHER, "--overlap"]).replace("srun", f"srun {ON_CHOSEN}", 1)
    else:
        srun = _srun(job, [*_one_task_a_node(job.nodes), *_END_TOGETHER])
    return _script(job, output, lines_with_restarts(srun, words, job), None)


def script_text(job: Job, output: Path, words: str, array: str | None = None) -> str:
    """Return the text of a script that runs `words`, quoted for the shell, once on each node.

    Args:
        output: pattern of the file for the job's output.
        array: numbers of the tasks of a job array, such as 0-3.
    """
    srun = _srun(job, srun_options(job.nodes))
    return _script(job, output, lines_once(f"{srun} {words}", job.settings.slurm), array)


def _srun(job: Job, options: list[str]) -> str:
    return shlex.join(["srun", *options, *_task_options(job.settings.slurm)])


def _script(job: Job, output: Path, lines: list[str], array: str | None) -> str:
    options = [f"#SBATCH {option}" for option in _options(job, output, array)]
    return "\n".join(["#!/bin/bash", *options, "", *lines]) + "\n"


def _options(job: Job, output: Path, array: str | None) -> Iterator[str]:
    slurm = job.settings.slurm
    gres, devices, chooses = slurm.gres, job.devices_per_node, chooses_nodes(job)
    valued = {
        "job-name": job.name,
        "array": array,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodes": str(job.nodes + (slurm.spare_nodes if chooses else 0)),
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
        "signal": f"B:{slurm.signal}" if requeues(slurm) else slurm.signal,
        "chdir": str(job.working_directory),
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
        "open-mode": "append",
    }
    for name, value in valued.items():
        if value is not None:
            yield f"--{name}={_quoted(value)}"
    if slurm.exclusive:
        yield "--exclusive"
    if chooses:
        yield "--no-kill"  # the job keeps its other nodes when one is lost
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
