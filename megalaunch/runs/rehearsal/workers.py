"""Train a rehearsal's spec with the launcher, agent and workers of a real run; the agent forks the workers."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.launch.directory import lock_run, unlock_run
from megalaunch.launch.display.report import failure_report
from megalaunch.launch.local import Launch, run_locally
from megalaunch.launch.run_state import throughput_basis
from megalaunch.launch.stop import StopSignals
from megalaunch.rundir.outcome import Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.rehearsal.display import PhaseLine
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class ForkedWorkers:
    """Trains specs on this machine's CPUs (`phases.Train`); a stop signal reaches the workers while there are any."""

    cores: int
    stop: StopSignals

    def __call__(self, spec: RunSpec, directory: RunDirectory, line: PhaseLine) -> tuple[Outcome, list[str]]:
        """Launch and wait for the end; raises RunDirectoryError."""
        lock = lock_run(directory)
        try:
            launch = Launch(spec, directory, lock, (), throughput_basis(spec), self.cores)
            end = run_locally(launch, self.stop, lambda view: line)
        finally:
            self.stop.watching = False
            unlock_run(directory, lock)
        return end.outcome, failure_report(spec, directory, end, "read the log")
