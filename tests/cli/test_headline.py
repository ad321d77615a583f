"""`megalaunch train recipe=llama3_8b parallel=tp4pp4` as typed: without its devices, with 4 and with 16 of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT

from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

HEADLINE = ("train", "recipe=llama3_8b", "parallel=tp4pp4")
_PROGRAM = """
import functools, sys
from megalaunch.cli.app import main
from megalaunch.launch import local
from megalaunch.platform import detect
from megalaunch.platform.chips import CHIPS

machine = detect.Machine(CHIPS["h100"], int(sys.argv[1]), 64, 2**40, (), free_disk=lambda path: 10**15)
detect.detect_machine = lambda: machine
local.Launch = functools.partial(local.Launch, worker_module="fake_worker")
sys.argv = ["megalaunch", *sys.argv[2:]]
main()
"""


def on_h100(devices: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run megalaunch as on a machine with H100: detection stands in for it, agent and launcher are the real ones."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(devices), *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )


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


def test_too_few_devices_are_the_world_with_a_fix_for_the_cluster(tmp_path):
    done = on_h100(4, tmp_path, *HEADLINE)
    assert done.returncode == 2
    assert "the world has 4 devices (1 x 4); the layout needs 16 (tp 4 x pp 4)" in done.stderr
    assert "fix:  cluster.nodes=4" in done.stderr


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
