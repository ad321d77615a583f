"""What one torchrun worker executes: run spec in, outcome.json out.

    python -m megalaunch.engine.agent ... -m megalaunch.engine.worker RUN/spec.yaml

Nothing heavy is imported before the worker has tied its life to its parent's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megalaunch.engine.hang_diagnostics import HangDiagnostics
from megalaunch.engine.worker_setup import StopSignal, die_with_parent, redirect_output

if TYPE_CHECKING:
    from megalaunch.config.schema import RunSpec
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter


USAGE = """usage: python -m megalaunch.engine.agent -m megalaunch.engine.worker RUN/spec.yaml
`megalaunch train` writes the spec and starts the workers; with --prepare-only it writes the spec and shows the commands
that start them by hand"""


WorkerMain = Callable[["RunSpec", "RunDirectory", int, "ProgressWriter", StopSignal], None]
"""What a rank does of a spec and a directory; returns when all ranks ended on purpose together."""


def train(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopSignal) -> None:
    """The life of a rank that trains."""
    from megalaunch.engine.train_worker import run_training

    run_training(spec, directory, rank, progress, stop)


def main(arguments: list[str], life: WorkerMain = train) -> int:
    """Run one rank; returns 0 for an end on purpose (the outcome says which), raises for a crash."""
    die_with_parent()
    stop = StopSignal()
    stop.install()
    if len(arguments) != 1 or "RANK" not in os.environ:
        print(USAGE, file=sys.stderr)
        return 2
    path = Path(arguments[0]).absolute()
    if not path.is_file():  # before anything is written beside it
        print(f"{path} is no file\n{USAGE}", file=sys.stderr)
        return 2
    from megalaunch.config.spec_file import read_spec
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter

    directory, rank = RunDirectory(path.parent), int(os.environ["RANK"])
    redirect_output(directory.rank_log(rank))
    diagnostics = HangDiagnostics(directory.collective_trace(rank), _attempt())
    diagnostics.install()
    progress = ProgressWriter(directory.progress(rank), rank, _attempt())
    progress.report("loading torch")
    try:
        life(read_spec(path), directory, rank, progress, stop)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk: the traceback still reaches the log, if anything does
            diagnostics.dump(error)  # before the event: who reads that looks for this
            _report_crash(directory, progress, rank, error)
        raise
    progress.report("done")
    return 0


def _attempt() -> int:
    """How often this group of workers was started before."""
    from megalaunch.rundir.environment import current_attempt

    return current_attempt(os.environ)


def _report_crash(directory: RunDirectory, progress: ProgressWriter, rank: int, error: BaseException) -> None:
    from megalaunch.rundir.events import record_event

    cause = error
    while (
        type(cause) is RuntimeError and cause.__cause__
    ):  # so a pipeline's stage wraps what went wrong, a lost peer too
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
