"""`megalaunch train recipe=llama3_8b parallel=tp4pp4` as typed: without its devices, on one machine, on 2 x 8."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from h100_stand_in import environment, on_h100, start_on_h100
from several_nodes import ended_processes, free_ports, slurm_step

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

HEADLINE = ("train", "recipe=llama3_8b", "parallel=tp4pp4")


@pytest.mark.slow
def test_sixteen_devices_get_sixteen_workers(tmp_path):
    done = on_h100(16, tmp_path, *HEADLINE, "train.exit_at_step=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 x 16 h100: pp 4 x tp 4" in done.stdout
    assert "[data.mock]" in done.stdout
    directory = RunDirectory(tmp_path / "runs/llama3_8b")
    assert all(f"fake rank {rank} " in directory.rank_log(rank).read_text() for rank in range(16))
    assert not directory.rank_log(16).exists()
    (launch,) = [event for event in read_lines(directory.events) if event["event"] == "launch"]
    assert launch["workers"] == 16


@pytest.mark.slow
@pytest.mark.release  # test_train_in_allocation.py has two nodes of fewer workers
def test_two_nodes_of_an_allocation_get_eight_workers_each(tmp_path):
    port = free_ports()
    nodes = [
        start_on_h100(8, tmp_path, *HEADLINE, "train.exit_at_step=2", **slurm_step(node, port)) for node in range(2)
    ]
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    assert "2 x 8 h100: pp 4 x tp 4" in first.output
    assert "2 x 8 h100" not in second.output  # said once
    directory = RunDirectory(tmp_path / "runs/llama3_8b")
    assert all(f"fake rank {rank} " in directory.rank_log(rank).read_text() for rank in range(16))
    (launch,) = [event for event in read_lines(directory.events) if event["event"] == "launch"]
    assert launch["workers"] == 16
    assert not directory.rendezvous.exists()


@pytest.mark.slow
@pytest.mark.release  # test_train_by_hand.py proves pasted lines with real workers
def test_the_lines_to_paste_start_it_on_two_machines(tmp_path):
    prepared = on_h100(8, tmp_path, *HEADLINE, "cluster.nodes=2", "train.exit_at_step=2", "--prepare-only")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    lines = [line for line in prepared.stdout.splitlines() if "--node-rank=" in line]
    first_node = f"localhost:{free_ports()}"
    commands = [
        shlex.split(line.replace("NODE0:29400", first_node).replace("megalaunch.engine.worker", "fake_worker"))
        for line in lines
    ]
    nodes = [
        subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    with ended_processes(nodes) as (first, second):
        assert (first.returncode, second.returncode) == (0, 0), first.output + second.output
    directory = RunDirectory(tmp_path / "runs/llama3_8b")
    assert all(f"fake rank {rank} " in directory.rank_log(rank).read_text() for rank in range(16))


def test_too_few_devices_are_named_first_with_a_rehearsal_and_a_fix_for_the_cluster(tmp_path):
    done = on_h100(4, tmp_path, *HEADLINE)
    assert done.returncode == 2
    first, rehearse, prepare, why, *_ = done.stderr.splitlines()
    assert first.startswith("error: this run needs 16 x h100 (2 nodes of 8); this machine has 4 x h100, 64 CPU cores")
    assert rehearse.endswith("megalaunch train recipe=llama3_8b parallel=tp4pp4 --rehearse")
    assert prepare.endswith("parallel=tp4pp4 cluster.nodes=2 cluster.devices_per_node=8 --prepare-only")
    assert why == "  why:  megalaunch explain platform.this_machine"
    assert "the world has 4 devices (1 x 4); the layout needs 16 (tp 4 x pp 4)" in done.stderr
    assert "fix:  cluster.nodes=4" in done.stderr


def test_too_few_devices_can_rehearse_and_prepare_the_run(tmp_path):
    done = on_h100(4, tmp_path, *HEADLINE, "--rehearse", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the run needs 16 x h100 (2 nodes of 8); this machine has 4 x h100, ")
    assert ["cluster.nodes", "2", "1"] in [line.split() for line in done.stdout.splitlines()]
    given = ("cluster.nodes=2", "cluster.devices_per_node=8")
    assert on_h100(4, tmp_path, *HEADLINE, *given, "--prepare-only").returncode == 0


@pytest.mark.parametrize("words", [("parallel=dp16",), ("parallel=tp8pp2dp1",)])
def test_a_given_dp_needs_its_devices_too(tmp_path, words):
    done = on_h100(8, tmp_path, "train", "recipe=llama3_8b", *words)
    assert done.stderr.startswith("error: this run needs 16 x h100 (2 nodes of 8); this machine has 8 x h100, ")


def test_given_nodes_are_not_exchanged(tmp_path):
    done = on_h100(4, tmp_path, *HEADLINE, "cluster.nodes=1")
    assert done.stderr.startswith("error: cluster.nodes  [parallel.world]")


def test_a_laptop_says_what_is_needed_in_one_screen(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "megalaunch", *HEADLINE, "run.name=two words"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    first, rehearse, prepare, why, *rest = done.stderr.splitlines()
    assert first.startswith("error: this run needs 16 x h100 (2 nodes of 8); this machine has no accelerator, ")
    assert rehearse.endswith("megalaunch train recipe=llama3_8b parallel=tp4pp4 'run.name=two words' --rehearse")
    assert prepare.endswith(" --prepare-only")
    assert why == "  why:  megalaunch explain platform.this_machine"
    assert "[data.mock]" in "\n".join(rest)
    assert "launcher.multi_node" not in done.stderr
    assert len(done.stderr.splitlines()) < 24
