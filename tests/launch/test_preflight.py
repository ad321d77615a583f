"""The preflight of a run on one node: the agent checks the node before it starts workers for the first time."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launching import events_of, run_fake, run_of, steps_of, tiny_spec
from paths import ROOT

from megalaunch.launch.directory import create_folders
from megalaunch.rundir.outcome import ExitCode, read_outcome
from megalaunch.schema.spec_file import write_spec

HOST = socket.gethostname()
FAULT = "its device 0000:01 has 3 uncorrected memory errors: reset or replace it"
TOOL = """#!/bin/sh
echo "$1" >> {folder}/asked
case "$1" in --query-gpu=*) echo "GPU-1, 0000:01, 3" ;; *) echo "GPU-1, 0000:01, 0, 0" ;; esac
"""


@pytest.fixture
def faulty_device(tmp_path, monkeypatch) -> Path:
    """The only device has memory errors, as the driver's tool says; the file that tells how often it was asked."""
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "asked"


def test_a_faulty_device_ends_the_run_before_its_workers_start(tmp_path, faulty_device):
    code, _, err = run_fake(tmp_path, tiny_spec(platform__chip="h100"))
    directory, reason = run_of(tmp_path), f"the preflight failed: node 0 ({HOST}): {FAULT}"
    assert code == ExitCode.CONFIGURATION
    assert err.startswith("megalaunch: the preflight failed (exit code 2)\n")
    assert err.endswith(
        "repair what is named above, then launch again; launcher.preflight=false leaves the checks out\n"
    )
    assert reason in " ".join(err.split())
    outcome = read_outcome(directory.outcome)
    assert (outcome.exit_code, outcome.reason, outcome.details) == (2, reason, {"failed_nodes": [0]})
    (ended,) = events_of(directory, "outcome")
    assert (ended["exit_code"], ended["reason"]) == (2, reason)
    assert events_of(directory, "restart") == events_of(directory, "worker_failed") == []
    assert list(directory.logs.glob("rank_*")) == []  # no worker started
    assert directory.agent_log.read_text() == f"megalaunch: {reason}\n"


def test_the_preflight_can_be_left_out(tmp_path, faulty_device):
    spec = tiny_spec(platform__chip="h100", launcher__preflight=False)
    assert run_fake(tmp_path, spec)[0] == 0
    assert not faulty_device.exists()


def test_a_restart_does_not_repeat_it(tmp_path, faulty_device):
    faulty_device.write_text("")
    tool = tmp_path / "bin/nvidia-smi"
    tool.write_text(tool.read_text().replace("0000:01, 3", "0000:01, 0"))
    code, _, err = run_fake(tmp_path, tiny_spec(platform__chip="h100"), FAKE_FAULT="kill:1:7")
    assert (code, err) == (0, "")
    assert len(events_of(run_of(tmp_path), "restart")) == 1
    assert len(faulty_device.read_text().splitlines()) == 2  # its memory errors, its remapped rows


def test_a_small_disk_is_named(tmp_path):
    disk = tmp_path / "run"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        code, _, err = run_fake(tmp_path, tiny_spec())
        said, steps = " ".join(err.split()), steps_of(run_of(tmp_path))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert (code, steps) == (ExitCode.CONFIGURATION, [])
    found = rf"node 0 \({HOST}\): {disk} has 8\.\d MB free, but 67\.1 MB are needed: free space there "
    assert re.search(found, said), said


def test_an_agent_without_a_launcher_says_it_too(tmp_path):
    directory = run_of(tmp_path)
    create_folders(directory)
    write_spec(tiny_spec(), directory.spec)
    agent = subprocess.run(
        [sys.executable, "-m", "megalaunch.engine.agent", "-m", "fake_worker", str(directory.spec)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "GLOO_SOCKET_IFNAME": "nope"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert agent.returncode == ExitCode.CONFIGURATION
    assert agent.stderr.startswith(f"megalaunch: the preflight failed: node 0 ({HOST}): GLOO_SOCKET_IFNAME=nope names ")
    assert len(agent.stderr.splitlines()) == 1
    assert f"megalaunch: {read_outcome(directory.outcome).reason}\n" == agent.stderr
