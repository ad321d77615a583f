"""Entry point of a torchrun worker of `generate` and `evaluate`: reads spec and job.json, writes answers.jsonl."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megalaunch.engine.worker import main

if TYPE_CHECKING:
    from megalaunch.config.schema import RunSpec
    from megalaunch.engine.worker_setup import StopSignal
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.rundir.progress import ProgressWriter


def run_worker(spec: RunSpec, directory: RunDirectory, rank: int, progress: ProgressWriter, stop: StopSignal) -> None:
    """Run the job of the run directory on this rank."""
    from megalaunch.engine.inference_worker import run_inference_worker as answer_job  # imports torch

    answer_job(spec, directory, rank, progress, stop)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], run_worker))
