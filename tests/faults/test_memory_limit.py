"""A worker that the kernel kills for memory, in a real cgroup, is reported as such on one node and on several."""

from __future__ import annotations

import contextlib
import os
import re

import pytest
from faulty_step import write_faulty_step
from launching import events_of, launched, run_of, tiny_spec
from memory_cgroup import memory_cgroup
from several_nodes import ended_processes, slurm_step, start_nodes, start_training_nodes

from megalaunch.rundir.outcome import read_outcome

pytestmark = pytest.mark.slow
LIMIT = 900 * 10**6  # an agent that has imported torch takes 400 MB
TAKE_MEMORY = "self.taken = [b'1' * 2**24 for _ in range(1000)]"
MESSAGE = r"killed by the kernel for memory: limit of its cgroup 90\d.\d MB, peak 90\d.\d MB"


def is_named(event: dict[str, object]) -> bool:
    return event["exception"] == "SIGKILL" and re.fullmatch(MESSAGE, str(event["message"])) is not None


def test_the_limit_is_named_on_one_node(tmp_path, record_property):
    fault = {"FAKE_FAULT": "memory:1:7"}
    with memory_cgroup(LIMIT) as group, contextlib.ExitStack() as stack:
        with group.joined():
            spec = tiny_spec(launcher__max_restarts=0)
            process = stack.enter_context(launched(tmp_path, spec, is_forked=False, **fault))
        _, err = process.communicate(timeout=60)
    failed = events_of(run_of(tmp_path), "worker_failed")
    assert [is_named(event) for event in failed].count(True) == 1, (failed, err)
    (killed,) = filter(is_named, failed)
    assert (killed["rank"], killed["step"]) == (1, 7)
    record_property("noticed", killed["time"] - run_of(tmp_path).metrics.stat().st_mtime)
    assert re.search(MESSAGE, err)


@pytest.mark.parametrize("worker", [pytest.param("fake", marks=pytest.mark.release), "forked"])
def test_the_limit_is_named_by_the_agent_of_its_node(tmp_path, worker):
    run = run_of(tmp_path)
    with memory_cgroup(LIMIT) as group:

        def limited(node):
            return group.joined() if node == 1 else contextlib.nullcontext()

        if worker == "fake":
            fault = {"FAKE_FAULT": "memory:1:7:2", "FAKE_STEP_SECONDS": "0.05"}
            settings = {"start_within": limited, "is_forked": False}  # a fork has the memory of this process, too
            nodes = start_nodes(tmp_path, slurm_step, "launcher.max_restarts=1", **settings, **fault)
        else:
            fault = f"open('/proc/self/oom_score_adj', 'w').write('1000'); {TAKE_MEMORY}"
            write_faulty_step(tmp_path, rank=1, step=7, fault=fault)
            path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
            nodes = start_training_nodes(
                tmp_path, "launcher.max_restarts=1", shared=tmp_path, start_within=limited, PYTHONPATH=path
            )
        with ended_processes(nodes) as (first, second):
            pass
    assert (first.returncode, second.returncode) == (5, 5), first.output + second.output
    killed = [event for event in events_of(run, "worker_failed") if is_named(event)]
    assert [(event["rank"], event["coordinates"], event["attempt"]) for event in killed] == [
        (1, "dp1", 0),
        (1, "dp1", 1),
    ]
    (restart,) = events_of(run, "restart")
    assert restart["attempt"] == 1
    assert re.fullmatch(rf"rank 1 \(dp1\) failed at step \d: SIGKILL: {MESSAGE}", restart["reason"])
    assert f"restart 1: {restart['reason']}" in first.output
    assert re.fullmatch(rf"rank 1 \(dp1\): SIGKILL: {MESSAGE}", read_outcome(run.outcome).reason)
    assert re.search("SIGKILL: killed by the kernel for memory", first.output)
