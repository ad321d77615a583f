"""Starting the real launcher on the fake worker, in a process of its own, for tests of the launch half."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from warm_process import PROGRAMS

from megalaunch.process import descendants, find_process, is_alive, kill_all
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, build_run_spec
from megalaunch.schema.spec_file import write_spec

WORKER = "fake_worker"

_PROGRAM = """
import sys
from pathlib import Path
from megalaunch.schema.spec_file import read_spec
from megalaunch.launch.directory import unlock_run, lock_run
from megalaunch.launch.local import Launch, run_locally
from megalaunch.launch.display.log_display import PlainDisplay
from megalaunch.launch.display.report import failure_report
from megalaunch.launch.stop import StopSignals
from megalaunch.launch.run_state import ThroughputBasis
from megalaunch.rundir.paths import RunDirectory

spec = read_spec(Path(sys.argv[1]))
directory = RunDirectory(Path(sys.argv[2]))
with StopSignals() as stop:
    lock = lock_run(directory)
    launch = Launch(spec, directory, lock, sys.argv[3:], ThroughputBasis(10**9, 2, 1e12), 2, "fake_worker")
    end = run_locally(launch, stop, lambda view: PlainDisplay())
    unlock_run(directory, lock)
for line in failure_report(spec, directory, end):
    print(line, file=sys.stderr)
sys.exit(end.outcome.exit_code)
"""
PROGRAMS.add(_PROGRAM)


def tiny_spec(**values: Any) -> RunSpec:
    """A resolved spec of two workers; `values` are leaves by `section__key`."""
    data: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 1},
        "batch": {"sequence_length": 8, "global_batch_size": 2},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 20},
        "cluster": {"nodes": 1, "devices_per_node": 2},
        "launcher": {"hang_timeout": 30.0, "stop_grace_period": 5.0, "restart_backoff": 0.1},
        "run": {"name": "fake"},
    }
    for path, value in values.items():
        section, _, key = path.partition("__")
        data.setdefault(section, {})[key] = value
    return build_run_spec(data)


@contextmanager
def launched(
    folder: Path, spec: RunSpec, is_forked: bool = True, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """The launcher's process; on leaving, nothing that it started is left, whatever the test found.

    A fork (warm_process.py) has the memory of this process; `is_forked=False` starts one of its own.
    """
    spec_file = folder / "input.yaml"
    write_spec(spec, spec_file)
    program = _PROGRAM if is_forked else f"{_PROGRAM}\n"  # which is none of PROGRAMS
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(spec_file), str(folder / "run"), "a word"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        left = descendants(process.pid)
        process.kill()
        process.communicate()
        kill_all(left, 5)


def run_fake(folder: Path, spec: RunSpec, **environment: str) -> tuple[int, str, str]:
    """Launch to the end: (exit code, stdout, stderr)."""
    with launched(folder, spec, **environment) as process:
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody can open a file for writing below `folder`, nor add or rename one; files that are open stay so."""
    if os.geteuid() == 0:  # whom permissions do not stop
        commands = (["mount", "--bind"], ["mount", "-o", "remount,bind,ro"])
        for command, places in zip(commands, ([folder, folder], [folder]), strict=True):
            if subprocess.run([*command, *map(str, places)], capture_output=True).returncode != 0:
                pytest.skip("mounting needs root outside of a container")
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    modes = [(path, path.stat().st_mode) for path in [folder, *folder.rglob("*")]]
    for path, mode in modes:
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in modes:
            path.chmod(mode)


def run_of(folder: Path) -> RunDirectory:
    """The run directory that `launched` uses."""
    return RunDirectory(folder / "run")


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Poll until the condition is true; its value.

    It is looked at every 10 ms if that takes 2 ms at most, else for a fifth of the time: what is waited for needs the
    cores, and a look at all processes takes longer.
    """
    began = time.monotonic()
    deadline = began + seconds
    while not (value := condition()):
        now = time.monotonic()
        assert now < deadline, "the condition did not come true in time"
        time.sleep(min(max(0.01, 4 * (now - began)), 0.2))
        began = time.monotonic()
    return value


def steps_of(directory: RunDirectory) -> list[int]:
    """The steps in the metrics file, in file order."""
    return [record["step"] for record in read_lines(directory.metrics)]


def events_of(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    """The events of one name."""
    return [record for record in read_lines(directory.events) if record["event"] == name]


def worker_pids(directory: RunDirectory) -> list[int]:
    """The pids that the ranks reported last."""
    from megalaunch.rundir.progress import read_progress

    records = [read_progress(path) for path in directory.logs.glob("rank_*.progress.json")]
    return [record.pid for record in records if record]


def running(pids: list[int]) -> list[int]:
    """Those that still run, zombies aside."""
    found = [find_process(pid) for pid in pids]
    return [process.pid for process in found if process and is_alive(process)]


def send(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the launcher."""
    process.send_signal(number)
