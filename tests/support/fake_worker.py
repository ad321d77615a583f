"""A worker without torch: counts steps through the run directory, and fails on demand, for tests of the launcher.

FAKE_FAULT="kind:rank:step[:attempts]" with kind raise|kill|memory|hang|stop|exit|superseded; attempts: how many it
strikes; several of them with commas in between.
FAKE_CHECKPOINT_INTERVAL: steps between checkpoints; without it there is one at the end.
FAKE_STEP_SECONDS: length of a step. FAKE_IGNORE_STOP=1: stop signals have no effect.
FAKE_ORPHAN=1: it does not die with its parent.
FAKE_WAIT_FOR_STORAGE=1: rank 0 waits, silently, while it cannot write its metrics.
FAKE_ABORT_AT_END=1: rank 0 aborts after it has written the outcome.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megalaunch.engine.worker_setup import StopSignal, die_with_parent, redirect_output
from megalaunch.rundir.environment import current_attempt
from megalaunch.rundir.events import record_event
from megalaunch.rundir.jsonl import append_line, keep_lines
from megalaunch.rundir.outcome import ExitCode, Outcome, write_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.rundir.progress import ProgressWriter, read_progress
from megalaunch.schema.spec_file import read_spec


def main() -> None:
    if not os.environ.get("FAKE_ORPHAN"):
        die_with_parent()
    stop = StopSignal()
    stop.install()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = current_attempt(os.environ)
    directory = RunDirectory(Path(sys.argv[-1]).parent)
    redirect_output(directory.rank_log(rank))
    progress = ProgressWriter(directory.progress(rank), rank, attempt)
    progress.coordinates = f"dp{rank}"
    progress.report("starting")
    spec = read_spec(directory.spec)
    print(f"fake rank {rank} attempt {attempt} threads {os.environ['OMP_NUM_THREADS']}")
    if rank == 0:
        record_event(directory, "phase", phase="counting", elapsed_seconds=0.1)
    step = newest_checkpoint(directory)
    if rank == 0:
        keep_lines(directory.metrics, lambda record: record["step"] <= step)
    last = min(spec.train.steps, spec.train.exit_at_step or spec.train.steps)
    try:
        while step < last and not (stop.signal and not os.environ.get("FAKE_IGNORE_STOP")):
            step += 1
            progress.report("step", step)
            fault(directory, rank, step, attempt)
            time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0.02")))
            if not met(directory, rank, world, attempt, step, progress, stop):
                step -= 1
                break
            if rank == 0:
                write_metrics(directory, step)
                if step % int(os.environ.get("FAKE_CHECKPOINT_INTERVAL", "1000000")) == 0:
                    directory.checkpoint(step).mkdir(parents=True, exist_ok=True)
                    record_event(directory, "checkpoint", step=step, path=str(directory.checkpoint(step)))
        if stop.signal:
            time.sleep(0.3)  # the agent ends the peers of a dead worker by SIGTERM too: that is no request to save
            for peer in range(world):
                there = read_progress(directory.progress(peer))
                if not directory.outcome.exists() and (there is None or not alive(there.pid)):
                    raise RuntimeError(f"Connection closed by peer {peer}")
    except Exception as error:
        tell_failure(directory, rank, attempt, progress.phase, step, error)
        raise
    if rank == 0:
        directory.checkpoint(step).mkdir(parents=True, exist_ok=True)
        code = ExitCode.DONE
        if stop.signal:
            code = ExitCode.INTERRUPTED if stop.signal == signal.SIGINT else ExitCode.PREEMPTED
        write_outcome(directory.outcome, Outcome(code, f"counted to {step}", step))
        if os.environ.get("FAKE_ABORT_AT_END"):
            os.abort()
    while not directory.outcome.exists():
        time.sleep(0.01)


def tell_failure(directory: RunDirectory, rank: int, attempt: int, phase: str, step: int, error: Exception) -> None:
    record_event(
        directory,
        "worker_failed",
        rank=rank,
        coordinates=f"dp{rank}",
        phase=phase,
        step=step,
        exception=type(error).__name__,
        message=str(error),
        attempt=attempt,
    )


def write_metrics(directory: RunDirectory, step: int) -> None:
    while True:
        try:
            return append_line(directory.metrics, metrics(step))
        except OSError:
            if not os.environ.get("FAKE_WAIT_FOR_STORAGE"):
                raise
            time.sleep(0.1)


def metrics(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 8.0 / (1 + step),
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": step * 2048,
        "tokens_per_second": 1000.0,
        "step_seconds": 0.02,
        "memory_bytes": 2**30,
    }


def newest_checkpoint(directory: RunDirectory) -> int:
    steps = [int(path.name[5:]) for path in directory.checkpoints.iterdir()]
    return max(steps, default=0)


def fault(directory: RunDirectory, rank: int, step: int, attempt: int) -> None:
    for one in os.environ.get("FAKE_FAULT", "none:0:0").split(","):
        kind, at_rank, at_step, *attempts = one.split(":")
        if (rank, step) == (int(at_rank), int(at_step)) and attempt < (int(attempts[0]) if attempts else 1):
            strike(kind)


def strike(kind: str) -> None:
    if kind == "raise":
        raise ValueError("told to fail")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills this process, however large others are
        taken = []
        while True:
            taken.append(b"\1" * 2**24)
    if kind == "exit":
        os._exit(3)
    if kind == "superseded":
        os._exit(int(ExitCode.PREEMPTED))
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang":
        while True:
            time.sleep(1)


def met(
    directory: RunDirectory, rank: int, world: int, attempt: int, step: int, progress: ProgressWriter, stop: StopSignal
) -> bool:
    """A barrier by way of the progress files; a peer that is gone is a lost connection, as in gloo.

    False where a request to stop came first: not every rank ends this step.
    """
    progress.report("meet", step)
    for peer in range(world):
        while peer != rank:
            there = read_progress(directory.progress(peer))
            if there and there.attempt == attempt:
                if there.step > step or (there.step == step and there.phase == "meet"):
                    break
                if not alive(there.pid):
                    raise RuntimeError(f"Connection closed by peer {peer}")
            if stop.signal and not os.environ.get("FAKE_IGNORE_STOP"):
                return False
            time.sleep(0.005)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    main()
