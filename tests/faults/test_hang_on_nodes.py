"""A rank that hangs on one of two nodes is named with its stacks, and the run ends or restarts as on one node."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faulty_step import write_faulty_step
from launching import events_of, running, steps_of, wait_until, worker_pids
from several_nodes import ended_processes, killed_on_failure, slurm_step, start_nodes, start_training_nodes

from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import read_progress

pytestmark = pytest.mark.timed

LOOPS = {
    "loop": "while True: pass",  # as a data set that never yields
    "native loop": "__import__('re').match('(a+)+$', 60 * 'a' + 'b')",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("shared")


def hangs_of(run: RunDirectory) -> list[dict]:
    return [event for event in events_of(run, "worker_failed") if event["exception"] == "hang"]


def has_stack(run: RunDirectory, rank: int) -> bool:
    text = run.rank_log(rank).read_text(errors="replace")
    return "(most recent call first)" in text and "/megalaunch/engine/" in text


@pytest.mark.parametrize("stopped", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_stopped_rank_of_any_node_is_named_within_its_limit(tmp_path, stopped):
    run = RunDirectory(tmp_path / "run")
    more = ("train.steps=100000", "launcher.max_restarts=0", "launcher.step_timeout=4")
    nodes = start_nodes(tmp_path, slurm_step, *more, FAKE_STEP_SECONDS="0.1")
    with killed_on_failure(nodes):
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 3, 60)
        os.kill(read_progress(run.progress(stopped)).pid, signal.SIGSTOP)
        began = time.monotonic()
        (hang,) = wait_until(lambda: hangs_of(run), 30)
        assert time.monotonic() - began < 7
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (6, 6), first.output + second.output
    assert (hang["rank"], hang["coordinates"], hang["attempt"]) == (stopped, f"dp{stopped}", 0)
    outcome = read_outcome(run.outcome)
    assert outcome.exit_code == 6
    assert outcome.reason.startswith(f"rank {stopped} (dp{stopped}): hang: no progress on any rank for 4 s")
    assert outcome.details == {"node": stopped, "rank": stopped, "phase": hang["phase"]}
    assert len(hangs_of(run)) == 1
    assert running(worker_pids(run)) == []


@pytest.mark.slow
def test_the_agents_restart_the_workers_after_a_hang(tmp_path):
    run = RunDirectory(tmp_path / "run")
    fault = {"FAKE_FAULT": "stop:1:7,kill:0:12:2,stop:1:15:3", "FAKE_STEP_SECONDS": "0.05"}
    nodes = start_nodes(tmp_path, slurm_step, "launcher.max_restarts=3", "launcher.step_timeout=2", **fault)
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    # The kill between them is of node 0: torch counts no restart on node 1 for it.
    assert [(event["rank"], event["attempt"]) for event in hangs_of(run)] == [(1, 0), (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "loop", "native loop"])
def test_a_rank_that_makes_no_progress_is_named_with_the_stacks_of_all(tmp_path, shared, kind):
    run = RunDirectory(tmp_path / "run")
    environment = {}
    if kind != "stop":
        write_faulty_step(tmp_path, rank=1, step=20, fault=LOOPS[kind])
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    nodes = start_training_nodes(tmp_path, "train.steps=4000", "launcher.max_restarts=0", shared=shared, **environment)
    with killed_on_failure(nodes):
        wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 18, 120)
        if kind == "stop":
            os.kill(read_progress(run.progress(1)).pid, signal.SIGSTOP)
        began = time.monotonic()
        (hang,) = wait_until(lambda: hangs_of(run), 60)
        seconds = time.monotonic() - began
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (6, 6), first.output + second.output
    print(f"{kind}: noticed after {seconds:.1f} s")
    # 12 s, and the answers of the other ranks. Of native code that keeps the interpreter's lock there is none.
    assert seconds < (20 if kind == "native loop" else 30)
    assert (hang["rank"], hang["coordinates"]) == (1, "dp1")
    assert "the workers hung" in first.output
    assert has_stack(run, 0)
    assert has_stack(run, 1) == (kind != "stop")
    assert {"stop": "", "loop": "it is busy", "native loop": "the other ranks wait"}[kind] in hang["message"]
    assert read_outcome(run.outcome).details["rank"] == 1
    assert running(worker_pids(run)) == []
