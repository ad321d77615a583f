"""`megalaunch train` inside an allocation of two nodes: the same command on each node, or typed once where srun is."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from h100_stand_in import start_on_h100
from launching import steps_of, wait_until
from several_nodes import ended_processes, free_ports, indexed_job, slurm_step, start_nodes, torchrun_variables
from training import tiny_overrides
from warm_process import MEGALAUNCH

from megalaunch.process import descendants, send_signal
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.rendezvous import read_credentials

# Starts the command once a node with the variables that Slurm's srun sets, after the options.
_SRUN = """#!/bin/sh
echo "$@" > srun.txt
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost,other
SLURM_NODEID=0 SLURM_PROCID=0 "$@" & first=$!
SLURM_NODEID=1 SLURM_PROCID=1 "$@" & second=$!
wait $first; code=$?
wait $second || exit $?
exit $code
"""


@pytest.mark.slow  # real workers on two nodes
def test_typed_once_in_a_slurm_job_it_starts_srun_and_trains(tmp_path):
    srun = tmp_path / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(_SRUN)
    srun.chmod(0o755)
    overrides = tiny_overrides(tmp_path, "cluster.devices_per_node=1")
    job = {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": "0",  # a batch script has it too
        "SLURM_PROCID": "0",
        "MASTER_PORT": str(free_ports()),
    }
    typed = subprocess.Popen(
        [*MEGALAUNCH, "train", *overrides],
        cwd=tmp_path,
        env={**os.environ, **job},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with ended_processes([typed]) as (done,):
        assert done.returncode == 0, done.output
    assert (tmp_path / "srun.txt").read_text().startswith("--nodes=2 --ntasks=2 --ntasks-per-node=1 ")
    assert done.output.count("  run        ") == 1  # the table of the run
    assert "finished all 20 steps" in done.output
    directory = RunDirectory(tmp_path / "run")
    assert steps_of(directory) == [*range(1, 11), 10, *range(11, 21), 20]
    assert read_outcome(directory.outcome).exit_code == 0
    assert directory.rank_log(1).exists()


@pytest.mark.slow
@pytest.mark.parametrize("variables", [torchrun_variables, indexed_job])
def test_the_same_command_on_every_node_starts_one_run(tmp_path, variables):
    with ended_processes(start_nodes(tmp_path, variables)) as (first, second):
        assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "counted to 20" in first.output
    assert "fake rank 1 attempt 0" in RunDirectory(tmp_path / "run").rank_log(1).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        pytest.param(signal.SIGUSR1, True, id="Slurm's warning to every process of a step"),
        pytest.param(signal.SIGTERM, False, id="Kubernetes' signal to the first process"),
    ],
)
def test_a_stop_signal_lets_the_workers_save(tmp_path, number, to_all):
    nodes = start_nodes(tmp_path, slurm_step, is_forked=False, FAKE_STEP_SECONDS="0.5")
    directory = RunDirectory(tmp_path / "run")
    try:
        wait_until(lambda: directory.metrics.exists() and directory.metrics.stat().st_size > 0, 60)
        secret = read_credentials(directory.rendezvous).secret.encode()
        for process in [process for node in nodes for process in descendants(node.pid)]:
            for shown in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{process.pid}/{shown}").read_bytes()
    finally:
        for node in nodes:
            below = descendants(node.pid) if to_all else []
            node.send_signal(number)
            for process in below:
                send_signal(process, number)
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (75, 75), first.output + second.output
    assert "stopped by a signal; the run can be resumed (exit code 75)" in first.output
    assert read_outcome(directory.outcome).reason.startswith("counted to ")  # the workers wrote it


def test_a_worker_that_fails_on_another_node_is_named(tmp_path):
    nodes = start_nodes(tmp_path, slurm_step, "launcher.max_restarts=0", FAKE_FAULT="raise:1:3")
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (5, 5), first.output + second.output
    outcome = read_outcome(RunDirectory(tmp_path / "run").outcome)
    assert outcome.reason == "rank 1 (dp1): ValueError: told to fail"
    assert outcome.details == {"node": 1, "rank": 1, "phase": "step"}
    assert "reason  rank 1 (dp1): ValueError: told to fail" in first.output


def test_a_number_of_nodes_that_is_not_the_allocations_is_refused(tmp_path):
    final_code = tmp_path / "final_code"
    done = subprocess.run(
        [*MEGALAUNCH, "train", *tiny_overrides(tmp_path, "cluster.nodes=3", "cluster.devices_per_node=1")],
        cwd=tmp_path,
        env={**os.environ, **slurm_step(1, 1), "MEGALAUNCH_FINAL_CODE": str(final_code)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "the run has 3 nodes, but the Slurm step has 2" in done.stderr
    assert "fix:  cluster.nodes=2" in done.stderr
    assert final_code.read_text() == "2\n"


@pytest.mark.slow  # it waits as long as a user does
def test_a_run_directory_that_is_not_shared_is_named_within_15_seconds(tmp_path):
    port = free_ports()
    nodes = []
    for node in range(2):
        folder = tmp_path / str(node)
        overrides = tiny_overrides(folder, "cluster.nodes=2", "cluster.devices_per_node=1", shared=tmp_path)
        nodes.append(start_on_h100(0, tmp_path, "train", *overrides, **slurm_step(node, port)))
    with ended_processes(nodes[1:], seconds=40) as (second,):
        assert second.returncode == 2
    assert (
        "all nodes must share the run directory; set run.directory to a path on a shared file system" in second.output
    )
    nodes[0].terminate()
    with ended_processes(nodes[:1]) as (first,):
        assert first.returncode == 75
