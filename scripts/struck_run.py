"""One run of recipe=tiny that faults strike: start it, make each kind of fault, see that it is noticed and survived."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import MEGALAUNCH, tiny_overrides

from megalaunch.fs import list_temporary_directories
from megalaunch.process import Process, descendants, find_process, is_alive, kill_all
from megalaunch.rundir.checkpoint.listing import checkpoints_by_step
from megalaunch.rundir.checkpoint.manifest import verify_checkpoint
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import Progress, read_progress
from megalaunch.rundir.tail import JsonlTail

KINDS = {
    "worker_killed": "kill -9 of a worker",
    "killed_in_save": "kill -9 of a worker while a checkpoint is written",
    "agent_killed": "kill -9 of the agent",
    "launcher_killed": "kill -9 of the launcher, then the same command",
    "preempted": "SIGTERM to the launcher, then the same command",
    "byte_flipped": "kill -9, and a bit of the newest checkpoint flipped",
    "file_cut": "kill -9, and a file of the newest checkpoint cut",
    "second_launch": "a second launch of the run, refused",
    "rank_stopped": "SIGSTOP of a rank",
}
"""Every kind of fault, and its words in the table; a method of StruckRun makes it."""
START_SECONDS = 4.0  # a restart takes about as long
RANKS = 2
FEWEST_STEPS = {"rank_stopped": 40}  # the launcher knows the usual time of a step by then
MOST_STEPS = 40  # from one fault to the next
LAST_STEPS = 20  # after the last fault
ENDLESS = ("train.steps=100000",)  # it ends at a step that is named after the last fault
MARK = "FAULT_STORM"  # a variable in the environment of everything that the storm starts


@dataclass(frozen=True)
class Strike:
    """One fault of the schedule.

    Attributes:
        kind: what it is (`KINDS`).
        rank: the rank that it hits.
        steps: new steps that are trained before it; 0: it strikes while the run restarts after the fault before.
        moment: 0 to 1: the moment within a save, a step or a restart, and the place within a file.
        async_save: how the run saves its checkpoints if the fault ends the launch.
    """

    kind: str
    rank: int
    steps: int
    moment: float
    async_save: bool


@dataclass(frozen=True)
class Result:
    """What a strike led to, in seconds from the fault: until it was noticed, and until a new step was trained."""

    kind: str
    step: int
    noticed: float
    next_step: float | None


class StruckRunError(Exception):
    """The run did not do what it must."""


class StruckRun:
    """One run, and the faults that hit it."""

    def __init__(self, folder: Path, shared: Path, limit: float) -> None:
        self.folder, self.directory = folder, RunDirectory(folder / "run")
        self._deadline = time.monotonic() + limit
        self._overrides = tiny_overrides(
            folder, *ENDLESS, "launcher.max_restarts=1000", "launcher.restart_backoff=0", shared=shared
        )
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._environment = {**os.environ, MARK: str(folder), "TMPDIR": str(self.temporary)}
        self._log = (folder / "launches.log").open("ab")
        self._launcher: subprocess.Popen[bytes] | None = None
        self._tail, self._events = JsonlTail(self.directory.events), list[dict[str, Any]]()
        self._restarted = 0  # place in `_events` of the newest start of workers
        self._highest = 0
        self.expected_restarts = 0

    # -- the run

    def launch(self, async_save: bool, *more: str) -> None:
        """Start the same command once more."""
        before = len(self._read_events())
        command = [*MEGALAUNCH, "train", *self._overrides, f"checkpoint.async_save={str(async_save).lower()}", *more]
        self._launcher = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._restarted = self._await_event("launch", before)

    def finish(self) -> int:
        """Stop the run, and train a few steps more up to a last one; return it."""
        self._stop()
        step = max(checkpoints_by_step(self.directory.checkpoints), default=0) + LAST_STEPS
        self.launch(False, f"train.exit_at_step={step}")
        if code := self._await_end():
            raise StruckRunError(f"the last launch ended with exit code {code}")
        return step

    def close(self) -> None:
        """Kill what is left."""
        if self._launcher is not None:
            left = descendants(self._launcher.pid)
            self._launcher.kill()
            self._launcher.wait()
            kill_all(left, 5)
        kill_all(self.processes(), 5)
        self._log.close()

    def processes(self) -> list[Process]:
        """Return the processes that the run has started, wherever they are now."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0") and (process := find_process(int(entry.name))):
                    found.append(process)
            except OSError:
                continue
        return [process for process in found if is_alive(process)]

    @property
    def restarts(self) -> int:
        """The restarts of the launchers so far."""
        return sum(event["event"] == "restart" for event in self._read_events())

    # -- the faults: each method returns when it struck (time.monotonic), and the seconds until it was noticed

    def strike(self, strike: Strike, wait: bool) -> Result:
        """Make a fault and see that it is noticed; with `wait`, see that new steps follow."""
        if strike.steps:
            target = self._highest + strike.steps
            self._until(lambda: (now := self._progress(0)) is not None and now.step >= target, f"step {target}")
            time.sleep(strike.moment * 0.05)
        else:
            time.sleep(strike.moment * START_SECONDS)
        step = max((now.step for rank in range(RANKS) if (now := self._progress(rank))), default=0)
        self._highest = max(self._highest, step)
        began, noticed = getattr(self, f"_{strike.kind}")(strike)
        next_step = None
        if wait and strike.kind != "second_launch":
            self._await_next_step()
            next_step = time.monotonic() - began
        return Result(strike.kind, step, noticed, next_step)

    def _worker_killed(self, strike: Strike) -> tuple[float, float]:
        worker = self._until(lambda: self._worker(strike.rank), f"rank {strike.rank} runs")
        return self._kill_and_restart(worker)

    def _killed_in_save(self, strike: Strike) -> tuple[float, float]:
        self._until(lambda: list_temporary_directories(self.directory.checkpoints), "a save begins")
        time.sleep(strike.moment * 0.04)  # a save takes about as long
        return self._worker_killed(strike)

    def _agent_killed(self, strike: Strike) -> tuple[float, float]:
        def agent() -> int | None:
            below = descendants(self._process.pid)
            return next((found.pid for found in below if "megalaunch.engine.agent" in _command_line(found.pid)), None)

        return self._kill_and_restart(self._until(agent, "the agent runs"))

    def _rank_stopped(self, strike: Strike) -> tuple[float, float]:
        before, began = len(self._read_events()), time.monotonic()
        os.kill(self._until(lambda: self._worker(strike.rank), f"rank {strike.rank} runs"), signal.SIGSTOP)
        failed = self._events[self._await_event("worker_failed", before)]
        noticed = time.monotonic() - began
        if (failed["exception"], failed["rank"]) != ("hang", strike.rank):
            raise StruckRunError(f"rank {strike.rank} was stopped, but the launcher reports {failed}")
        self._await_restart(before)
        return began, noticed

    def _launcher_killed(self, strike: Strike) -> tuple[float, float]:
        began = time.monotonic()
        noticed = self._kill_launcher()
        self.launch(strike.async_save)
        return began, noticed

    def _preempted(self, strike: Strike) -> tuple[float, float]:
        began = time.monotonic()
        noticed = self._stop()
        self.launch(strike.async_save)
        return began, noticed

    def _byte_flipped(self, strike: Strike) -> tuple[float, float]:
        def flip(file: Path) -> None:
            content = bytearray(file.read_bytes())
            content[int(strike.moment * len(content))] ^= 1 << int(strike.moment * 1000) % 8
            file.write_bytes(content)

        return self._damage(strike, flip)

    def _file_cut(self, strike: Strike) -> tuple[float, float]:
        return self._damage(strike, lambda file: os.truncate(file, int(strike.moment * file.stat().st_size)))

    def _damage(self, strike: Strike, alter: Callable[[Path], None]) -> tuple[float, float]:
        """Kill the launcher and alter a file of the newest checkpoint: the one before must be used."""
        self._until(lambda: len(self._valid_checkpoints()) > 1, "two checkpoints are valid")
        began = time.monotonic()
        self._kill_launcher()
        newest, older = self._valid_checkpoints()[:2]
        files = sorted(newest.iterdir())
        alter(files[int(strike.moment * len(files))])
        relaunched = time.monotonic()
        self.launch(strike.async_save)
        refused = self._events[self._await_event("checkpoint_refused", self._restarted)]
        noticed = time.monotonic() - relaunched
        resumed = self._events[self._await_event("resumed", self._restarted)]
        if (refused["path"], resumed["checkpoint"]) != (str(newest), str(older)):
            raise StruckRunError(
                f"{newest} was altered, but {refused['path']} is refused, {resumed['checkpoint']} used"
            )
        return began, noticed

    def _second_launch(self, strike: Strike) -> tuple[float, float]:
        began = time.monotonic()
        command = [*MEGALAUNCH, "train", *self._overrides]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode != 2 or f"in use by process {self._process.pid}" not in done.stderr:
            raise StruckRunError(f"a second launch ended with exit code {done.returncode}: {done.stderr[-500:]}")
        return began, time.monotonic() - began

    # -- their parts

    def _kill_and_restart(self, pid: int) -> tuple[float, float]:
        """kill -9 a process below the launcher, which must restart the workers."""
        before, began = len(self._read_events()), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self._await_restart(before)
        return began, time.monotonic() - began

    def _kill_launcher(self) -> float:
        """kill -9 the launcher; return the seconds until nothing is left of its launch. Raises after 5 s."""
        began = time.monotonic()
        self._process.kill()
        self._process.wait()
        while self.processes():
            if time.monotonic() - began > 5:
                raise StruckRunError(f"{len(self.processes())} processes live 5 s longer than their launcher")
            time.sleep(0.01)
        return time.monotonic() - began

    def _stop(self) -> float:
        """Send SIGTERM to the launcher; return the seconds until the launch is over."""
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        code = self._await_end()
        if code != 75 or self.processes():
            raise StruckRunError(f"exit code {code} after SIGTERM, and {len(self.processes())} processes are left")
        return time.monotonic() - began

    def _await_end(self) -> int:
        self._until(lambda: self._process.poll() is not None, "the launch ends", alive=False)
        return self._process.returncode

    def _await_restart(self, after: int) -> None:
        self.expected_restarts += 1
        self._restarted = self._await_event("restart", after)

    def _await_next_step(self) -> None:
        """Wait for a step of the workers that were started last."""

        def trains() -> dict[str, Any] | None:
            new = self._read_events()[self._restarted :]
            return next((event for event in new if (event["event"], event.get("phase")) == ("phase", "training")), None)

        first = self._until(trains, "the workers train again")["step"]
        self._until(lambda: (now := self._progress(0)) is not None and now.step > first, "a new step")

    def _await_event(self, name: str, after: int) -> int:
        """Wait for an event after the first `after` ones; return its place."""

        def found() -> int | None:
            events = self._read_events()
            return next((place + 1 for place in range(after, len(events)) if events[place]["event"] == name), None)

        return self._until(found, f"the event {name}") - 1

    def _until(self, condition: Callable[[], Any], what: str, alive: bool = True) -> Any:
        """Poll until the condition is true, and return its value; with `alive` the launcher must live."""
        while not (value := condition()):
            if time.monotonic() > self._deadline:
                raise StruckRunError(f"the time is over while waiting for this: {what}")
            if alive and self._process.poll() is not None:
                raise StruckRunError(f"exit code {self._process.returncode} while waiting for this: {what}")
            time.sleep(0.01)
        return value

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._launcher is not None, "launch it first"
        return self._launcher

    def _read_events(self) -> list[dict[str, Any]]:
        self._events += self._tail.read_new()[0]
        return self._events

    def _progress(self, rank: int) -> Progress | None:
        return read_progress(self.directory.progress(rank))

    def _worker(self, rank: int) -> int | None:
        """Return the pid of a rank's live worker below the launcher."""
        now, below = self._progress(rank), {process.pid for process in descendants(self._process.pid)}
        return now.pid if now is not None and now.pid in below else None

    def _valid_checkpoints(self) -> list[Path]:
        """Return the checkpoints without damage, newest first."""
        return [
            path for path in checkpoints_by_step(self.directory.checkpoints).values() if not verify_checkpoint(path)
        ]


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
