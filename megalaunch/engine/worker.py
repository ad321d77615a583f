"""What one torchrun worker executes: run spec in, outcome.json out.

    torchrun ... -m megalaunch.engine.worker RUN/spec.yaml

Nothing heavy is imported before the worker has tied its life to its parent's.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from megalaunch.engine.process import StopRequest, die_with_parent, own_output

if TYPE_CHECKING:
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter


def main(arguments: list[str]) -> int:
    """Run one rank; returns 0 for an end on purpose (the outcome says which), raises for a crash."""
    die_with_parent()
    stop = StopRequest()
    stop.install()
    if len(arguments) != 1 or "RANK" not in os.environ:
        print(
            "usage: torchrun --nproc-per-node N -m megalaunch.engine.worker RUN/spec.yaml\n"
            "(`megalaunch train` writes the spec and starts the workers; --dry-run shows the command)",
            file=sys.stderr,
        )
        return 2
    from megalaunch.config.spec_file import read_spec
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter

    path = Path(arguments[0]).resolve()
    directory, rank = RunDirectory(path.parent), int(os.environ["RANK"])
    own_output(directory.rank_log(rank))
    faulthandler.enable()
    progress = ProgressWriter(directory.progress(rank), rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    progress.report("loading torch")
    try:
        spec = read_spec(path)
        from megalaunch.engine.life import live

        live(spec, directory, rank, progress, stop)
    except BaseException as error:
        _report_crash(directory, progress, rank, error)
        raise
    progress.report("done")
    return 0


def _report_crash(directory: RunDirectory, progress: ProgressWriter, rank: int, error: BaseException) -> None:
    from megalaunch.rundir.events import record_event

    record_event(
        directory,
        "worker_failed",
        rank=rank,
        coordinates=progress.coordinates,
        phase=progress.phase,
        step=progress.step,
        exception=type(error).__name__,
        message=str(error)[:2000],
        trace=traceback.format_exc()[-4000:],
        attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
