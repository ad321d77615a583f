"""The link between two hosts is cut or slow: one set of workers writes, stale ones end, and nothing of it is lost."""

from __future__ import annotations

import subprocess
import time
from contextlib import AbstractContextManager
from statistics import median

import pytest
from cluster_runs import losses_of, processes, started
from launching import events_of, steps_of, wait_until
from linked_hosts import LinkedHosts, linked_hosts
from training import tiny_overrides, train_tiny

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

pytestmark = [pytest.mark.timed, pytest.mark.slow]
STEPS = 40
LENGTH = (f"train.steps={STEPS}", f"schedule.decay_steps={STEPS}", "schedule.warmup_steps=10")
STALE_SECONDS = 12
"""An agent that hears nothing ends its workers after 8 s, and looks every second."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with linked_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


def by_ssh(hosts: LinkedHosts, folder, shared, *more: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """`megalaunch train` on the login machine."""
    overrides = tiny_overrides(folder, *LENGTH, *hosts.overrides, "launcher.max_restarts=3", *more, shared=shared)
    return started(folder, *overrides, inside=hosts.login)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def undisturbed(shared):
    """The losses of the run that nothing happens to."""
    (shared / "undisturbed").mkdir()
    code, _, err = train_tiny(shared / "undisturbed", *LENGTH, shared=shared)
    assert (code, err) == (0, "")
    return losses_of(RunDirectory(shared / "undisturbed/run"))


def on_hosts(run: RunDirectory) -> list[int]:
    """What runs on the hosts: agents and workers."""
    return processes(str(run.root), "megalaunch.engine.agent")


def test_a_cut_link_is_a_lost_node_and_only_the_new_workers_write(
    hosts, tmp_path, shared, undisturbed, record_property
):
    """Host 0 is cut off, whose rank writes the checkpoints: from the other host, and from who launched the run."""
    run = RunDirectory(tmp_path / "run")
    with by_ssh(hosts, tmp_path, shared) as train:
        wait_until(lambda: len(steps_of(run)) > 12, 120)
        hosts.cut(0)
        stale, began = on_hosts(run), time.monotonic()
        assert len(stale) == 4
        wait_until(lambda: not set(stale) & set(on_hosts(run)), STALE_SECONDS)
        ended = time.time()
        record_property("noticed", time.monotonic() - began)
        time.sleep(max(0.0, began + 14 - time.monotonic()))
        hosts.heal(0)
        before = len(steps_of(run))
        wait_until(lambda: len(steps_of(run)) > before, 120)
        record_property("next step", time.monotonic() - began)
        output, _ = train.communicate(timeout=180)
    assert train.returncode == 0, output
    first, *later = [event["time"] for event in events_of(run, "phase") if event["phase"] == "joining"]
    assert first < ended < min(later)  # no two sets of workers at the same time
    assert not on_hosts(run)
    assert len(losses_of(run)) == STEPS
    assert losses_of(run) == undisturbed


@pytest.mark.release
def test_a_slow_link_only_slows_the_run(hosts, tmp_path, shared, undisturbed):
    run = RunDirectory(tmp_path / "run")
    with by_ssh(hosts, tmp_path, shared) as train:
        wait_until(lambda: len(steps_of(run)) > 12, 120)
        hosts.slow_down("1mbit")
        before = len(steps_of(run))
        time.sleep(20)  # more than twice the silence after which a node is lost
        hosts.speed_up()
        output, _ = train.communicate(timeout=180)
    assert train.returncode == 0, output
    assert not events_of(run, "restart")
    seconds = [line["step_seconds"] for line in read_lines(run.metrics) if "loss" in line]
    assert max(seconds[before : before + 5]) > 3 * median(seconds[5:before])
    assert losses_of(run) == undisturbed


@pytest.mark.release
def test_a_slow_network_is_told_before_the_first_step(hosts, tmp_path, shared, undisturbed):
    """1 Mbit/s, where the cluster is said to have a hundred times as much."""
    run = RunDirectory(tmp_path / "run")
    hosts.slow_down("1mbit")
    overrides = ("train.exit_at_step=1", "cluster.node_bandwidth=0.0125")
    with by_ssh(hosts, tmp_path, shared, *overrides) as train:
        wait_until(lambda: bool(events_of(run, "network")), 120)
        hosts.speed_up()
        output, _ = train.communicate(timeout=180)
    assert train.returncode == 0, output
    (event,) = events_of(run, "network")
    assert event["bandwidth"] < 0.2e-3
    assert f"an all-reduce over 2 nodes has {event['bandwidth']} GB/s, where the plan counts" in " ".join(
        output.split()
    )
