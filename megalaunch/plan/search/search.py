"""Enumerates layouts, drops the invalid and the too big with their reasons, ranks the rest by predicted speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megalaunch.config.schema import RunSpec
from megalaunch.plan.cost import StepTime, step_time
from megalaunch.plan.memory import Memory, predict_memory
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.plan.search.filter import broken_batch, first_violated_rule
from megalaunch.plan.search.space import grids, micro_batches, pipeline_splits, recomputations, shardings, split_layers
from megalaunch.platform.chips import CHIPS

TOO_BIG = "memory.fits"
"""The rule of what does not fit (plan/rules/memory.py); here the memory model is asked without it, which is faster."""


class SearchError(ValueError):
    """There is nothing to search: the device's speed or memory is not known, or the spec is open."""


@dataclass(frozen=True)
class Found:
    """A layout that is valid and fits, as a whole spec, with what is predicted for it."""

    spec: RunSpec
    memory: Memory
    time: StepTime

    @property
    def speed(self) -> float:
        """Tokens per second and device."""
        return self.time.tokens_per_second_per_device


@dataclass(frozen=True)
class SearchResult:
    """All that was found, the fastest first.

    `dropped` counts layouts by the rule they break (a whole grid of degrees counts once where the degrees are at
    fault; `memory.fits` for those that are too big), `leaner` those that were not timed because they recompute more
    than a layout that fits, and are slower for it. `own` is the layout that the spec had, if it is valid and fits;
    `own_fault` says why it is not.
    """

    ranked: tuple[Found, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    leaner: int = 0
    device_bytes: float = 0.0
    own: Found | None = None
    own_fault: str = ""

    @property
    def valid(self) -> int:
        """Layouts that are valid and fit."""
        return len(self.ranked) + self.leaner

    @property
    def num_considered(self) -> int:
        """Layouts looked at."""
        return self.valid + self.dropped.total()

    def place(self, found: Found) -> int:
        """The rank of a layout, from 1: one more than are faster."""
        return 1 + sum(other.speed > found.speed for other in self.ranked)


def _unreported(done: int, total: int) -> None:
    """Nobody looks on."""


def search(spec: RunSpec, devices: int | None = None, report: Callable[[int, int], None] = _unreported) -> SearchResult:
    """Search the layouts of a resolved spec on `devices` devices (None: as many as it has).

    `report` is called with (grids of degrees searched, all of them). Raises SearchError with the reason when no layout
    can be judged.
    """
    spec = _on(spec, devices)
    per_node = int(spec.cluster.devices_per_node)
    world = spec.cluster.nodes * per_node
    room = _room(spec)
    dropped: Counter[str] = Counter()
    ranked: list[Found] = []
    leaner = 0
    with suggestions_disabled():
        all_grids = list(grids(spec, world, per_node))
        for index, grid in enumerate(all_grids, 1):
            for node in _nodes(grid, dropped):
                found, more = _within(node, room, dropped)
                ranked += found
                leaner += more
            report(index, len(all_grids))
        own, fault = _own(spec, room)
    if own is not None and not any(_same(own.spec, found.spec) for found in ranked):
        ranked.append(own)
    ranked.sort(key=lambda found: (-found.speed, found.memory.total))
    return SearchResult(tuple(ranked), dropped, leaner, room, own, fault)


def _on(spec: RunSpec, devices: int | None) -> RunSpec:
    """The spec on so many devices, in machines of the size it has."""
    given = spec.cluster.devices_per_node
    if isinstance(given, int):
        per_node = given
    else:
        chip = CHIPS.get(spec.platform.chip)
        known = chip.devices_per_node if chip else None
        if known is None and devices is None:
            raise SearchError("how many devices there are is open; give cluster.devices_per_node or --devices")
        per_node = known or devices or 1
    world = devices or spec.cluster.nodes * per_node
    per_node = min(per_node, world)
    if world % per_node:
        raise SearchError(f"{world} devices are no whole number of machines of {per_node}")
    spec = replace(spec, cluster=replace(spec.cluster, nodes=world // per_node, devices_per_node=per_node))
    p = spec.parallel
    dp, rest = divmod(world, p.tp * p.pp * p.cp)
    return replace(spec, parallel=replace(p, dp=None if rest or not dp else dp))


def _room(spec: RunSpec) -> float:
    """Bytes of one device."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or chip.memory_bytes is None or not chip.peak_flops:
        raise SearchError(f"memory and speed of {spec.platform.chip} are not known; name a chip, e.g. platform=h100")
    if spec.model.vocab_size is None:
        raise SearchError("the vocabulary is open; give model.vocab_size")
    return float(chip.memory_bytes)


def _nodes(grid: RunSpec, dropped: Counter[str]) -> Iterator[RunSpec]:
    """The grid with its layers divided and its states sharded in every way that breaks no rule."""
    p = grid.parallel
    choices = pipeline_splits(grid.model.num_layers, grid.model.mtp.num_layers, p.pp)
    if p.dp is None or not choices:
        dropped[first_violated_rule(grid) or "parallel.layers_by_pp"] += 1
        return
    for division in choices:
        for sharding in shardings(grid):
            node = split_layers(grid, division, sharding)
            node = replace(node, batch=replace(node.batch, micro_batch_size=1), recompute=recomputations(node)[0])
            reason = first_violated_rule(node)
            if reason is None:
                yield node
            else:
                dropped[reason] += 1


def _within(node: RunSpec, room: float, dropped: Counter[str]) -> tuple[list[Found], int]:
    """Micro batches and recomputation within one node: for each micro batch the least recomputation that fits."""
    found: list[Found] = []
    leaner = 0
    ladder = recomputations(node)
    for size in micro_batches(node):
        batch = replace(node.batch, micro_batch_size=size)
        steps = [replace(node, batch=batch, recompute=recompute) for recompute in ladder]
        reason = broken_batch(steps[0]) if size > 1 else None
        if reason is not None:
            dropped[reason] += len(steps)
            continue
        fitting = _least_that_fits(steps, room)
        if fitting is None:
            dropped[TOO_BIG] += len(steps)
            continue
        place, memory = fitting
        dropped[TOO_BIG] += place
        leaner += len(steps) - place - 1
        reason = broken_batch(steps[place]) if place else None
        if reason is None:
            found.append(Found(steps[place], memory, step_time(steps[place])))
        else:
            dropped[reason] += 1
    return found, leaner


def _least_that_fits(steps: list[RunSpec], room: float) -> tuple[int, Memory] | None:
    """The first step of a ladder that fits; the last is tried second, since mostly the first or none fits."""
    first = predict_memory(steps[0])
    if first.total <= room:
        return 0, first
    last = predict_memory(steps[-1])
    if last.total > room:
        return None
    for place, spec in enumerate(steps[1:-1], 1):
        memory = predict_memory(spec)
        if memory.total <= room:
            return place, memory
    return len(steps) - 1, last


def _own(spec: RunSpec, room: float) -> tuple[Found | None, str]:
    """The layout that the spec came with, or why it cannot run."""
    broken = first_violated_rule(spec)
    if broken is not None:
        return None, f"it breaks the rule {broken}"
    memory = predict_memory(spec)
    if memory.total > room:
        return None, f"it needs {memory.total / 2**30:.1f} GiB a device of {room / 2**30:.1f}"
    return Found(spec, memory, step_time(spec)), ""


def _same(spec: RunSpec, other: RunSpec) -> bool:
    """Whether two specs of one search are the same layout."""
    return (spec.parallel, spec.batch, spec.recompute) == (other.parallel, other.batch, other.recompute)
