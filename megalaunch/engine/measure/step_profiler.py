"""Record the kernels of some steps with torch.profiler: a trace for a viewer, and a summary."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalaunch.engine.measure.profile_summary import HOST, RecordedOperator, summarize
from megalaunch.engine.platform.platform import Platform
from megalaunch.engine.platform.registry import platform_of
from megalaunch.fs import make_directory, write_file_atomically
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.logging import LoggingSpec
from megalaunch.schema.profile_steps import profile_steps


class StepProfiler:
    """Profiler of the steps of `logging.profile` on the ranks of `logging.profile_ranks`; free of cost elsewhere.

    Args:
        settings: The `logging` section.
        directory: The run directory; files go to `profiles/`.
        rank: This rank.
        device: This rank's device.
    """

    def __init__(self, settings: LoggingSpec, directory: RunDirectory, rank: int, device: torch.device) -> None:
        chosen = settings.profile is not None and rank in settings.profile_ranks
        self._steps = profile_steps(settings.profile) if settings.profile is not None and chosen else range(0)
        self._folder, self._rank, self._device = directory.profiles, rank, device
        self._platform = platform_of(device)
        self._profile: profile | None = None
        self._seconds: list[float] = []

    @contextmanager
    def record(self, step: int) -> Iterator[None]:
        """Record what runs inside, if `step` is to be profiled."""
        if step not in self._steps:
            yield
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self._platform.profiler_activity is not None:
                activities.append(self._platform.profiler_activity)
            self._profile = profile(activities=activities, acc_events=True)
            self._profile.start()
        started = time.perf_counter()
        with record_function(f"step {step}"):
            yield
            self._platform.synchronize(self._device)  # kernels that still run belong to this step
        self._seconds.append(time.perf_counter() - started)

    def write_after(self, step: int, last_step: int) -> Path | None:
        """Write the files after the last profiled step, or the run's last; return the summary's path, else None.

        Raises:
            OSError: The files cannot be written.
        """
        if self._profile is None or step < min(self._steps[-1], last_step):
            return None
        recorded, self._profile = self._profile, None
        recorded.stop()
        make_directory(self._folder)
        first = step - len(self._seconds) + 1
        name = f"steps_{first}-{step}_rank_{self._rank}"
        with tempfile.TemporaryDirectory() as scratch:
            trace = Path(scratch) / f"{name}.trace.json.gz"
            recorded.export_chrome_trace(str(trace))
            write_file_atomically(self._folder / trace.name, trace.read_bytes())
        title = f"steps {first} to {step} of rank {self._rank} on {self._device.type}"
        summary = self._folder / f"{name}.txt"
        write_file_atomically(summary, summarize(_operators(recorded, self._platform), self._seconds, title))
        return summary


def _operators(recorded: profile, platform: Platform) -> list[RecordedOperator]:
    """Return the kernels of the device, or the operators of the CPU by their own time."""
    events = recorded.events() or []  # type: ignore[no-untyped-call]
    if platform.profiler_activity is not None:
        intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            if platform.is_kernel(event) and not event.is_user_annotation:
                intervals[event.name].append((event.time_range.start, event.time_range.end))
        return [
            RecordedOperator(name, sum(end - start for start, end in found), len(found), tuple(found))
            for name, found in intervals.items()
        ]
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        name = HOST if event.is_user_annotation else event.name
        times[name].append(event.self_cpu_time_total)
    return [RecordedOperator(name, sum(found), len(found)) for name, found in times.items()]
