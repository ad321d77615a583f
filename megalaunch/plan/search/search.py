"""Enumerate layouts, drop those that are invalid or too big with the reasons, rank the rest by predicted speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from megalaunch.plan.cost import Stack, StepTime, UnknownChipSpeed, known_peak, step_time
from megalaunch.plan.memory import Memory, predict_memory
from megalaunch.plan.rules.registry import RULES, Rule
from megalaunch.plan.rules.suggestions import suggestions_disabled
from megalaunch.plan.search.filter import TOO_BIG, find_layout_rules, first_refusal
from megalaunch.plan.search.space import (
    grids,
    micro_batches,
    pipeline_splits,
    recomputations,
    replicas,
    shardings,
    split_layers,
)
from megalaunch.plan.world import data_parallel_size, resolved_world_size
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec
from megalaunch.schema.recompute import RecomputeSpec


class SearchError(ValueError):
    """The search cannot start: a device's speed or memory is unknown, the spec is open, or no layout can be valid."""


@dataclass(frozen=True)
class Found:
    """A layout that is valid and fits, as a complete spec, with its predicted memory and time."""

    spec: RunSpec
    memory: Memory
    time: StepTime

    @property
    def speed(self) -> float:
        """Tokens per second and device."""
        return self.time.tokens_per_second_per_device


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, the fastest layout first.

    Attributes:
        dropped: number of layouts by the rule that they violate; a grid of degrees counts once if the degrees are
            invalid, `memory.fits` counts those that are too big.
        leaner: layouts that were not timed because they recompute more than one that fits, so they are slower.
        own: the layout of the given spec, if it is valid and fits.
        own_fault: why it is not.
    """

    ranked: tuple[Found, ...]
    dropped: Counter[str] = field(default_factory=Counter)
    leaner: int = 0
    device_bytes: float = 0.0
    own: Found | None = None
    own_fault: str = ""

    @property
    def valid(self) -> int:
        """Number of layouts that are valid and fit."""
        return len(self.ranked) + self.leaner

    @property
    def num_considered(self) -> int:
        """Number of layouts enumerated."""
        return self.valid + self.dropped.total()

    def place(self, found: Found) -> int:
        """Return the rank of a layout, from 1: one more than the number of faster ones."""
        return 1 + sum(other.speed > found.speed for other in self.ranked)


def _unreported(done: int, total: int) -> None:
    """Do nothing: the default progress callback."""


def search(
    spec: RunSpec,
    devices: int | None = None,
    report: Callable[[int, int], None] = _unreported,
    stack: Stack | None = None,
) -> SearchResult:
    """Search the layouts of a resolved spec on `devices` devices (None: those of the spec).

    Args:
        report: called with (grids of degrees searched, number of grids).
        stack: whose kernels the layouts run on; None: this engine's.

    Raises:
        SearchError: no layout can be predicted; the message has the reason.
    """
    spec = _on(spec, devices)
    per_node = int(spec.cluster.devices_per_node)
    world = resolved_world_size(spec.cluster)
    limit = _device_bytes(spec)
    dropped: Counter[str] = Counter()
    ranked: list[Found] = []
    leaner = 0
    with suggestions_disabled():
        rules = _rules_of(spec)
        all_grids = list(grids(spec, world, per_node))
        for index, grid in enumerate(all_grids, 1):
            for found, more in _searched(grid, rules, limit, dropped, stack):
                ranked += found
                leaner += more
            report(index, len(all_grids))
        own, fault = _own(spec, rules, limit, stack)
    if own is not None and not any(_same(own.spec, found.spec) for found in ranked):
        ranked.append(own)
    ranked.sort(key=lambda found: (-found.speed, found.memory.total))
    return SearchResult(tuple(ranked), dropped, leaner, limit, own, fault)


def _on(spec: RunSpec, devices: int | None) -> RunSpec:
    """Return the spec on `devices` devices, in nodes of its size."""
    given = spec.cluster.devices_per_node
    if isinstance(given, int):
        per_node = given
    else:
        chip = CHIPS.get(spec.platform.chip)
        known = chip.devices_per_node if chip else None
        if known is None and devices is None:
            raise SearchError("the number of devices is open; give cluster.devices_per_node or --devices")
        per_node = known or devices or 1
    nodes = spec.cluster.nodes
    world = devices or per_node * (nodes if isinstance(nodes, int) else 1)
    per_node = min(per_node, world)
    if world % per_node:
        raise SearchError(f"{world} devices are not divisible into nodes of {per_node}")
    spec = replace(spec, cluster=replace(spec.cluster, nodes=world // per_node, devices_per_node=per_node))
    return replace(spec, parallel=replace(spec.parallel, dp=data_parallel_size(world, spec.parallel)))


def _device_bytes(spec: RunSpec) -> float:
    """Return the memory of one device in bytes; raises SearchError if it, the speed or the vocabulary is unknown."""
    chip = CHIPS.get(spec.platform.chip)
    if chip is None or chip.memory_bytes is None or not chip.peak_flops:
        raise SearchError(f"memory and speed of {spec.platform.chip} are unknown; select a chip, e.g. platform=h100")
    try:
        known_peak(spec, chip)
    except UnknownChipSpeed as error:
        raise SearchError(f"layouts have no predicted speed: {error}") from error
    if spec.model.vocab_size is None:
        raise SearchError("the vocabulary is open; give model.vocab_size")
    return float(chip.memory_bytes)


def _rules_of(spec: RunSpec) -> tuple[Rule, ...]:
    """Return the rules for the layouts of a spec; raises SearchError if another rule refuses all of them."""
    found = find_layout_rules(spec)
    if found.refusals:
        reasons = "".join(f"\n  [{refusal.rule}] {refusal.message}" for refusal in found.refusals)
        raise SearchError(f"the engine refuses every layout; `megalaunch plan` without --search shows fixes:{reasons}")
    return found.rules


def _searched(
    grid: RunSpec, rules: tuple[Rule, ...], limit: float, dropped: Counter[str], stack: Stack | None
) -> Iterator[tuple[list[Found], int]]:
    """Yield what `_within` finds in the grid with each split of layers, sharding of states and number of replicas.

    More replicas hold more states, so they are not tried where fewer do not fit.
    """
    p = grid.parallel
    choices = pipeline_splits(grid.model.num_layers, grid.model.mtp.num_layers, p.pp)
    if p.dp is None or not choices:
        refusal = first_refusal(grid, rules)
        dropped[refusal.rule if refusal else "parallel.layers_by_pp"] += 1
        return
    for split, sharding in product(choices, shardings(grid)):
        for number in replicas(grid, split, sharding):
            node = split_layers(grid, split, sharding, number)
            node = replace(node, recompute=recomputations(node)[0])
            sizes = _valid_micro_batches(node, rules, dropped)
            if not sizes:
                continue
            found, leaner = _within(_with_micro_batch(node, sizes[0]), sizes, rules, limit, dropped, stack)
            yield found, leaner
            if not found:
                break


def _with_micro_batch(spec: RunSpec, size: int) -> RunSpec:
    return replace(spec, batch=replace(spec.batch, micro_batch_size=size))


def _valid_micro_batches(node: RunSpec, rules: tuple[Rule, ...], dropped: Counter[str]) -> list[int]:
    """Return the micro batches that violate no rule; if all do, they count once as dropped."""
    sizes = tuple(micro_batches(node)) or (1,)
    refused: dict[int, str] = {}
    for size in sizes:
        likely = (RULES[refused[size // 2]],) if size // 2 in refused else ()  # a rule that refused the last size
        refusal = first_refusal(_with_micro_batch(node, size), (*likely, *rules))
        if refusal is not None:
            refused[size] = refusal.rule
    if len(refused) == len(sizes):
        dropped[refused[sizes[0]]] += 1
        return []
    for broken in refused.values():
        dropped[broken] += len(recomputations(node))
    return [size for size in sizes if size not in refused]


def _within(
    node: RunSpec, sizes: list[int], rules: tuple[Rule, ...], limit: float, dropped: Counter[str], stack: Stack | None
) -> tuple[list[Found], int]:
    """Search micro batches and recomputation: for each micro batch the least recomputation that fits.

    Args:
        node: a layout with the first of `sizes` as its micro batch, without recomputation.
        sizes: micro batches that violate no rule with it.
    """
    found: list[Found] = []
    leaner = 0
    ladder = _valid_recomputations(node, rules, len(sizes), dropped)
    for size in sizes:
        steps = [_with_micro_batch(replace(node, recompute=recompute), size) for recompute in ladder]
        fitting = _least_that_fits(steps, limit)
        if fitting is None:
            dropped[TOO_BIG] += len(steps)
            continue
        index, memory = fitting
        dropped[TOO_BIG] += index
        leaner += len(steps) - index - 1
        refusal = first_refusal(steps[index], rules) if size != sizes[0] and index else None
        if refusal is None:
            found.append(Found(steps[index], memory, step_time(steps[index], stack)))
        else:
            dropped[refusal.rule] += 1
    return found, leaner


def _valid_recomputations(
    node: RunSpec, rules: tuple[Rule, ...], num_sizes: int, dropped: Counter[str]
) -> list[RecomputeSpec]:
    """Return the recomputations that violate no rule at the node's micro batch; others count once for each size."""
    first, *others = recomputations(node)  # `_searched` has checked the first
    valid = [first]
    for recompute in others:
        refusal = first_refusal(replace(node, recompute=recompute), rules)
        if refusal is None:
            valid.append(recompute)
        else:
            dropped[refusal.rule] += num_sizes
    return valid


def _least_that_fits(steps: list[RunSpec], limit: float) -> tuple[int, Memory] | None:
    """Return the first step that fits; the last one is tried second, since usually the first or none fits."""
    first = predict_memory(steps[0])
    if first.total <= limit:
        return 0, first
    last = predict_memory(steps[-1])
    if last.total > limit:
        return None
    for index, spec in enumerate(steps[1:-1], 1):
        memory = predict_memory(spec)
        if memory.total <= limit:
            return index, memory
    return len(steps) - 1, last


def _own(spec: RunSpec, rules: tuple[Rule, ...], limit: float, stack: Stack | None) -> tuple[Found | None, str]:
    """Return the layout of the given spec, or why it cannot run."""
    refusal = first_refusal(spec, rules)
    if refusal is not None:
        return None, f"it violates the rule {refusal.rule}: {refusal.message}"
    memory = predict_memory(spec)
    if memory.total > limit:
        return None, f"it needs {memory.total / 2**30:.1f} GiB of the {limit / 2**30:.1f} GiB of a device"
    return Found(spec, memory, step_time(spec, stack)), ""


def _same(spec: RunSpec, other: RunSpec) -> bool:
    """Return whether two specs of one search have the same layout."""
    return (spec.parallel, spec.batch, spec.recompute) == (other.parallel, other.batch, other.recompute)
