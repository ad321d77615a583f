"""What the tests of real launchers share: `megalaunch train` as a process, its agents, and the losses of its run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from launching import steps_of, wait_until
from made_once import made_once
from training import tiny_overrides
from typer.testing import CliRunner
from warm_process import COLD_MEGALAUNCH

from megalaunch.cli.app import app
from megalaunch.launchers.record import read_record
from megalaunch.process import descendants, kill_all
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory

STEPS = 120
LENGTH = (f"train.steps={STEPS}", f"schedule.decay_steps={STEPS}", "schedule.warmup_steps=10")
STEPS_ON_FEWER = 100
ON_FEWER = (f"train.steps={STEPS_ON_FEWER}", "train.validation_interval=1000", "checkpoint.interval=5")
"""Of a run that nodes leave and join: its longer warmup keeps differences of rounding from growing."""
TOLERANCE = 1e-5  # of losses under another layout, as for checkpoints of random layouts


def call(folder: Path, *arguments: str, seconds: float = 240) -> tuple[int, str]:
    """A command of megalaunch in the folder; its exit code and output."""
    done = subprocess.run([*COLD_MEGALAUNCH, *arguments], cwd=folder, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr


def shown(*arguments: str | Path) -> str:
    """What a command that succeeds prints, run in this process.

    Another one would be seconds late in a short run, and its imports would take the cores of what is waited for.
    """
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def undisturbed_run(factory: pytest.TempPathFactory, length: Sequence[str] = LENGTH) -> RunDirectory:
    """The run of this length on two workers of this machine that nothing happens to, made once for all tests."""
    steps = length[0].removeprefix("train.steps=")

    def make(folder: Path) -> None:
        code, output = call(folder, "train", *tiny_overrides(folder, "cluster.devices_per_node=2", *length))
        assert code == 0, output

    return RunDirectory(made_once(factory, f"undisturbed_{steps}_steps", make) / "run")


def assert_losses_on_fewer(run: RunDirectory, factory: pytest.TempPathFactory) -> None:
    """The run of ON_FEWER, part of it on fewer nodes, has the losses and tokens of an undisturbed one."""
    undisturbed, steps = undisturbed_run(factory, ON_FEWER), list(range(1, STEPS_ON_FEWER + 1))
    assert list(losses_of(run)) == steps
    np.testing.assert_allclose(list(losses_of(run).values()), list(losses_of(undisturbed).values()), rtol=TOLERANCE)
    assert tokens_of(run) == tokens_of(undisturbed)


def detached_and_stopped(folder: Path, run: RunDirectory, *overrides: str) -> str:
    """Detach a run, start it again in vain, and stop it, which saves; returns what the first command printed."""
    code, output = call(folder, "train", *overrides, "--detach")
    assert code == 0, output
    wait_until(lambda: run.metrics.exists() and len(steps_of(run)) > 3, 120)
    code, refused = call(folder, "train", *overrides)
    assert (code, f"has job {read_record(run.job).id} already: RUNNING" in refused) == (2, True), refused
    assert call(folder, "stop", str(run.root))[0] == 0
    wait_until(lambda: " has ended)" in shown("status", run.root), 60)
    outcome = read_outcome(run.outcome)
    assert outcome.exit_code == 75
    assert run.checkpoint(outcome.step).is_dir()
    return output


@contextmanager
def started(folder: Path, *overrides: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """`megalaunch train` in a process of its own; on leaving, nothing of it is left. A failure shows what it said.

    `inside` begins the command line, such as with the namespace that it runs in.
    """
    command = [*inside, *COLD_MEGALAUNCH, "train", *overrides]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    failed = True
    try:
        yield process
        failed = False
    finally:
        left = descendants(process.pid)
        process.kill()
        said, _ = process.communicate()
        kill_all(left, 5)
        if failed:
            print(said, *_last_events(overrides), sep="\n")  # with the failure, which pytest shows


def _last_events(overrides: Sequence[str], number: int = 20) -> list[Record]:
    """The end of the events of the run that the overrides place."""
    (root,) = [word.partition("=")[2] for word in overrides if word.startswith("run.directory=")]
    return list(read_lines(RunDirectory(Path(root)).events))[-number:]


def processes(*words: str) -> list[int]:
    """The pids of the processes whose command lines have all these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(int(entry.name))
    return found


def agents(run: RunDirectory, *words: str) -> list[int]:
    """The pids of a run's agents; the workers that they forked have the same command lines."""
    found = processes(str(run.root), "megalaunch.engine.agent", *words)
    return [pid for pid in found if parent_of(pid) not in found]


def workers(run: RunDirectory) -> list[int]:
    """The pids of a run's forked workers."""
    found = processes(str(run.root), "megalaunch.engine.agent")
    return [pid for pid in found if parent_of(pid) in found]


def parent_of(pid: int) -> int | None:
    """The pid of the parent; None: the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def losses_of(run: RunDirectory) -> dict[int, float]:
    """The loss of each step; a step that was computed again must have the same."""
    losses: dict[int, float] = {}
    for record in read_lines(run.metrics):
        if "loss" in record:
            assert losses.setdefault(record["step"], record["loss"]) == record["loss"]
    return losses


def tokens_of(run: RunDirectory) -> list[int]:
    """The tokens that were trained up to each step."""
    return [record["tokens"] for record in read_lines(run.metrics) if "loss" in record]
