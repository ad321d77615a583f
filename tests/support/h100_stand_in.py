"""Running megalaunch as on a machine with H100: detection and workers are stand-ins, agent and launcher are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT
from warm_process import PROGRAMS

_PROGRAM = """
import functools, os, sys
from megalaunch.cli.main import main
from megalaunch.launch import local, node
from megalaunch.platform import detect
from megalaunch.platform.allocation import find_allocation
from megalaunch.platform.chips import CHIPS

machine = detect.Machine(
    CHIPS["h100"], int(sys.argv[1]), 64, 2**40, (),
    free_disk=lambda path: 10**15, allocation=find_allocation(os.environ),
)
detect.detect_machine = lambda: machine
local.Launch = functools.partial(local.Launch, worker_module="fake_worker")
node.NodeAgent = functools.partial(node.NodeAgent, worker_module="fake_worker")
sys.argv = ["megalaunch", *sys.argv[2:]]
main()
"""
PROGRAMS.add(_PROGRAM)


def environment(**more: str) -> dict[str, str]:
    """The environment of a command whose workers are fake ones."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "COLUMNS": "120", **more}


def on_h100(devices: int, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run megalaunch to its end on a machine with as many H100."""
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(devices), *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


def start_on_h100(
    devices: int, folder: Path, *command: str, is_forked: bool = True, **more: str
) -> subprocess.Popen[str]:
    """Start megalaunch so, with further variables; /proc shows those, and its command line, unless it is a fork."""
    return subprocess.Popen(
        [sys.executable, *([] if is_forked else ["-u"]), "-c", _PROGRAM, str(devices), *command],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
