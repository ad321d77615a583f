"""Find stragglers: ranks whose device computes slower than those of the others, or that wait for a CPU or their tokens.

Step times do not tell who is slow, as every rank waits in collectives for the slowest. So each rank times the same
matmuls at the same step, without a collective, and says how long it waited for a CPU and for data. The times of its
phases tell where it is slow. Megatron-LM's counterpart is `log_straggler`.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.precision.policy import compute_dtype
from megalaunch.engine.train.cpu_wait import CpuWait
from megalaunch.engine.train.phase_clock import MEASURED, Measured, PhaseClock
from megalaunch.engine.train.rank_sync import all_gather_numbers, all_gather_objects
from megalaunch.engine.train.run_logger import RunLogger
from megalaunch.schema import RunSpec

Cause = Literal["compute", "cpu", "data"]

_CHECKS = 3  # in a row, so that one busy moment of a machine is no straggler
_DEFAULT_INTERVAL = 100
_ROUNDS = 3
_PROBE_SECONDS = 2e-3  # of one round
_SHOWN = 8


def time_matmuls(device: torch.device, dtype: torch.dtype, products: int) -> float:
    """Return the seconds of equal matmuls on this device: the best of three rounds, after one to warm up.

    On CPUs those of the thread, without the time in which it waits for a CPU, which `CpuWait` measures.
    """
    platform = platform_of(device)
    clock = time.perf_counter if platform.has_streams else time.thread_time
    size = platform.probe_size
    values = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
    out = torch.empty_like(values)
    rounds = []
    for _ in range(_ROUNDS + 1):
        platform.synchronize(device)
        started = clock()
        for _ in range(products):
            torch.mm(values, values, out=out)
        platform.synchronize(device)
        rounds.append(clock() - started)
    return min(rounds[1:])


@dataclass(frozen=True)
class Check:
    """What the ranks say at one check, in rank order.

    Attributes:
        seconds: of the probe; the speed of a rank is the median over its own.
        cpu_waits: share of the time that each rank waited for a CPU.
        times: seconds a step in each phase.
    """

    seconds: Sequence[float]
    cpu_waits: Sequence[float]
    times: Mapping[Measured, Sequence[float]]

    @property
    def data_waits(self) -> list[float]:
        """Share of the time that each rank waited for data."""
        return [waited / step for waited, step in zip(self.times["data"], self.times["step"], strict=True)]

    def slow_ranks(self, threshold: float) -> Mapping[Cause, list[int]]:
        """Return the ranks whose speed is below `threshold` (`train.straggler_threshold`) of the usual one, by cause.

        Waits count beyond what is usual. On a machine that is too busy for all of its ranks these take turns in waiting
        for a CPU, now one and now another: for this cause twice the wait of the others is usual.
        """
        usual, usual_wait = median(self.seconds), median(self.data_waits)
        return {
            "compute": [rank for rank, mine in enumerate(self.seconds) if usual < threshold * mine],
            "cpu": [
                rank
                for rank, mine in enumerate(self.cpu_waits)
                if 1 - (mine - 2 * self._usual_cpu_wait(rank)) < threshold
            ],
            "data": [rank for rank, mine in enumerate(self.data_waits) if 1 - (mine - usual_wait) < threshold],
        }

    def speed(self, cause: Cause, ranks: Sequence[int]) -> float:
        """Return the speed of the slowest of these ranks."""
        if cause == "compute":
            return median(self.seconds) / max(self.seconds[rank] for rank in ranks)
        waits = self.cpu_waits if cause == "cpu" else self.data_waits
        return 1 - max(waits[rank] for rank in ranks)

    def _usual_cpu_wait(self, rank: int) -> float:
        """Return the median of the other ranks: among two ranks that of all would have half of the rank's own wait."""
        return median([*self.cpu_waits[:rank], *self.cpu_waits[rank + 1 :]])


class StragglerDetector:
    """Check of all ranks every `train.straggler_interval` steps. Logs an event when a rank is slow in three in a row.

    The event is repeated for a rank only after a check in which it was not slow. `update` is collective.

    Attributes:
        clock: of this rank, to be the observer of its steps.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        interval = spec.train.straggler_interval
        if interval is None:
            interval = _DEFAULT_INTERVAL if platform_of(mesh.device).has_streams else 0
        self._interval = interval if mesh.topology.world > 1 else 0
        self._threshold, self._mesh = spec.train.straggler_threshold, mesh
        self._ranks_per_node = int(spec.cluster.devices_per_node)
        self._dtype, self._products = compute_dtype(spec.precision), 0
        self._slow: Counter[tuple[Cause, int]] = Counter()  # checks in a row
        self._cpu_wait, self.clock = CpuWait(), PhaseClock()

    def update(self, step: int, seconds: float, waited: float, record: RunLogger) -> None:
        """Count one step, and check all ranks if it is due.

        Args:
            step: Number of the step that has ended.
            seconds: Its duration.
            waited: Seconds of it in which this rank waited for data.
            record: Gets the event `straggler`, one for each cause.
        """
        self.clock.add("step", seconds)
        self.clock.add("data", waited)
        if not self._interval or step % self._interval:
            return
        check = self._check()
        for cause, ranks in check.slow_ranks(self._threshold).items():
            self._count(cause, ranks)
            named = [rank for rank in ranks if self._slow[cause, rank] == _CHECKS]
            if named:
                record.event(
                    "straggler",
                    step=step,
                    cause=cause,
                    ranks=named,
                    nodes=sorted({rank // self._ranks_per_node for rank in named}),
                    places=self._places(named),
                    speed=round(check.speed(cause, named), 3),
                    times={phase: [round(all_[rank], 6) for rank in named] for phase, all_ in check.times.items()},
                    median_times={phase: round(median(all_), 6) for phase, all_ in check.times.items()},
                )

    def _check(self) -> Check:
        """Gather what all ranks have measured since the last check."""
        times = self.clock.take()
        mine = (self._time_probe(), self._cpu_wait.share(), *(times[phase] for phase in MEASURED))
        seconds, cpu_waits, *phases = all_gather_numbers(self._mesh.device, *mine)
        return Check(seconds, cpu_waits, dict(zip(MEASURED, phases, strict=True)))

    def _time_probe(self) -> float:
        """Time as many matmuls as take 2 ms on most ranks: the same number on all of them."""
        device, dtype = self._mesh.device, self._dtype
        if self._products == 0:
            (each,) = all_gather_numbers(device, time_matmuls(device, dtype, products=1))
            self._products = max(1, round(_PROBE_SECONDS / median(each)))
        return time_matmuls(device, dtype, self._products)

    def _count(self, cause: Cause, ranks: Sequence[int]) -> None:
        for rank in range(self._mesh.topology.world):
            self._slow[cause, rank] = self._slow[cause, rank] + 1 if rank in ranks else 0

    def _places(self, ranks: Sequence[int]) -> list[str]:
        """Return where these ranks are, a host whose ranks are all among them as one place. Collective."""
        hosts = [str(host) for host in all_gather_objects(socket.gethostname())]
        on_host, slow = Counter(hosts), Counter(hosts[rank] for rank in ranks)
        whole = [host for host in slow if 1 < slow[host] == on_host[host]]
        places = [f"all {on_host[host]} ranks on {host}" for host in whole]
        coordinates = self._mesh.topology.coordinates
        places += [f"rank {rank} ({coordinates(rank)}) on {hosts[rank]}" for rank in ranks if hosts[rank] not in whole]
        return places[:_SHOWN]
