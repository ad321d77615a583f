"""Variants side by side: one step of each in turn, so that a slow moment meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from engine_variants.ranks import asked_ranks
from engine_variants.shape import Work
from engine_variants.variants import VARIANTS

WARM = 2  # steps that are not counted


@dataclass
class Times:
    """Of one variant on rank 0: seconds of every step, processor seconds of all ranks, the losses, and the split."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    split: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds a step."""
        return statistics.median(self.wall)


def side_by_side(names: Sequence[str], work: Work, ranks: int, steps: int) -> dict[str, Times]:
    """Times of all variants, each on `ranks` processes of its own with one thread each.

    Raises RuntimeError when a rank fails.
    """
    times = {name: Times() for name in names}
    with ExitStack() as started:
        ask = {name: started.enter_context(asked_ranks(ranks, _rank, name, work)) for name in names}
        for turn in range(WARM + steps):
            for name, one in times.items():
                loss, wall, processor = ask[name]("step")
                one.losses.append(loss)
                if turn >= WARM:
                    one.wall.append(wall)
                    one.processor.append(processor)
        for name, one in times.items():
            one.split = ask[name]("split")
    return times


def _rank(rank: int, ranks: int, folder: str, line: Connection, name: str, work: Work) -> None:
    dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=rank, world_size=ranks)
    one = VARIANTS[name](work)
    answers = {"step": lambda: _step(one), "split": lambda: _split(one)}
    while (request := line.recv()) in answers:
        dist.barrier()
        line.send(answers[request]())
    dist.destroy_process_group()


def _step(one: Callable[[], float]) -> tuple[float, float, float]:
    """The loss, seconds until all ranks are done, and processor seconds of all of them."""
    started, used = time.perf_counter(), time.process_time()
    loss = one()
    dist.barrier()
    return loss, time.perf_counter() - started, _sum(time.process_time() - used)


def _sum(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


@contextmanager
def _waits() -> Iterator[list[float]]:
    """Seconds that this thread waits for collectives, one number a wait."""
    waited: list[float] = []
    original = dist.Work.wait

    def timed(self: dist.Work, *args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        try:
            return original(self, *args, **kwargs)  # type: ignore[arg-type]
        finally:
            waited.append(time.perf_counter() - started)

    dist.Work.wait = timed  # type: ignore[method-assign, assignment]
    try:
        yield waited
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]


def _split(one: Callable[[], float]) -> dict[str, float]:
    """Shares of one profiled step: arithmetic, exposed communication, and the host (Python, autograd, dispatch)."""
    with _waits() as waited, profile(activities=[ProfilerActivity.CPU]) as profiled:
        started = time.perf_counter()
        one()
        whole = time.perf_counter() - started
    communication, compute = sum(waited), 0.0
    for event in profiled.events() or ():
        if event.name.startswith(("_c10d_functional::wait_tensor", "c10d::")):
            communication += event.self_cpu_time_total / 1e6
        elif event.name.startswith("aten::"):
            compute += event.self_cpu_time_total / 1e6
    return {
        "compute": compute / whole,
        "communication": communication / whole,
        "host": max(0.0, 1 - (compute + communication) / whole),
    }
