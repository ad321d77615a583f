"""Entry point of one worker process: reads the run spec, writes outcome.json.

    python -m megalaunch.engine.agent ... -m megalaunch.engine.worker RUN/spec.yaml

Heavy imports come only after `die_with_parent`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megalaunch.engine.hang_dump import HangDump
from megalaunch.engine.worker_setup import StopSignal, die_with_parent, redirect_output, uncollected_imports

if TYPE_CHECKING:
    from megalaunch.engine.run_rank import RankEntrypoint
    from megalaunch.rundir.fence import Fence
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter


USAGE = """usage: python -m megalaunch.engine.agent -m megalaunch.engine.worker RUN/spec.yaml
`megalaunch train` writes the spec and starts the workers; with --prepare-only it writes the spec and shows the commands
that start them by hand"""


def load_train_entrypoint() -> RankEntrypoint:
    """Return the entrypoint of a training rank; imports torch."""
    from megalaunch.engine.train_rank import train

    return train


def main(arguments: list[str], load_entrypoint: Callable[[], RankEntrypoint] = load_train_entrypoint) -> int:
    """Run one rank; returns 0 for a controlled end (see outcome.json), 2 for wrong arguments, raises for a crash."""
    die_with_parent()
    stop = StopSignal()
    stop.install()
    if len(arguments) != 1 or "RANK" not in os.environ:
        print(USAGE, file=sys.stderr)
        return 2
    path = Path(arguments[0]).absolute()
    if not path.is_file():  # checked before files are written to its folder
        print(f"{path} is no file\n{USAGE}", file=sys.stderr)
        return 2
    from megalaunch.rundir.environment import agent_restarts
    from megalaunch.rundir.fence import Fence
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter
    from megalaunch.schema.spec_file import read_spec

    directory, rank = RunDirectory(path.parent), int(os.environ["RANK"])
    redirect_output(directory.rank_log(rank))
    fence = Fence(directory.attempts, restarted=agent_restarts(os.environ) > 0)
    hang_dump = HangDump(directory.collective_trace(rank), _attempt())
    hang_dump.install()
    progress = ProgressWriter(directory.progress(rank), rank, _attempt())
    progress.report("loading torch")
    try:
        with uncollected_imports():
            spec, entrypoint = read_spec(path), load_entrypoint()
            from megalaunch.engine.nvrx_reporter import reports_to_rank_monitor
            from megalaunch.engine.run_rank import run_rank

        with reports_to_rank_monitor(spec, progress):
            run_rank(spec, directory, rank, progress, stop, entrypoint, fence)
    except BaseException as error:
        _end_if_superseded(error, fence)
        with contextlib.suppress(OSError):  # a full disk: the traceback still goes to the log
            hang_dump.dump(error)  # before the event, whose reader looks for the trace
            _report_crash(directory, progress, rank, error)
        raise
    progress.report("done")
    return 0


def _attempt() -> int:
    """Return how many times this group of workers was started before."""
    from megalaunch.rundir.environment import current_attempt

    return current_attempt(os.environ)


def _end_if_superseded(error: BaseException, fence: Fence) -> None:
    """End this process with exit code 75 if later workers have taken over the run, whatever the error is."""
    from megalaunch.rundir.fence import Superseded
    from megalaunch.rundir.outcome import ExitCode

    found: BaseException = error
    try:
        fence.check()
    except (Superseded, OSError) as superseded:
        found = superseded if isinstance(superseded, Superseded) else error
    if isinstance(found, Superseded):
        print(f"megalaunch: {found}", file=sys.stderr, flush=True)
        os._exit(int(ExitCode.PREEMPTED))  # nothing of this attempt is worth a wait for its peers


def _report_crash(directory: RunDirectory, progress: ProgressWriter, rank: int, error: BaseException) -> None:
    from megalaunch.rundir.events import record_event

    cause = error
    while (
        type(cause) is RuntimeError and cause.__cause__
    ):  # a pipeline stage wraps every error, also a lost peer, in a RuntimeError
        cause = cause.__cause__
    record_event(
        directory,
        "worker_failed",
        rank=rank,
        coordinates=progress.coordinates,
        phase=progress.phase,
        step=progress.step,
        exception=type(cause).__name__,
        message=str(cause)[:2000],
        trace=traceback.format_exc()[-4000:],
        attempt=_attempt(),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
