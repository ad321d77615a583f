"""Suggest valid numbers near an invalid one: candidates for fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import gcd

from megalaunch.plan.batch import batch_gcd
from megalaunch.plan.rules.registry import Fix, RuleContext
from megalaunch.plan.world import smallest_world

_SPAN = 1024  # candidates tried on each side
_wanted: ContextVar[bool] = ContextVar("fixes are wanted", default=True)


@contextmanager
def suggestions_disabled() -> Iterator[None]:
    """Disable suggestions while a fix is verified: only findings count, and suggestions would take most of the time."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


def suggestions_enabled() -> bool:
    """Return False while a fix is verified, for rules whose fixes are slow to find."""
    return _wanted.get()


def nearest(key: str, value: int, legal: Callable[[int], bool], count: int = 3) -> Iterator[Fix]:
    """Yield fixes `key=n` for the `count` legal n >= 1 nearest to `value`, smaller ones first at equal distance."""
    if not _wanted.get():
        return
    found = 0
    for distance in range(1, _SPAN):
        for candidate in (value - distance, value + distance):
            if candidate >= 1 and legal(candidate):
                yield {key: candidate}
                found += 1
                if found == count:
                    return


def multiples(key: str, value: int, step: int) -> Iterator[Fix]:
    """Yield fixes `key=n` for the multiples of `step` just below and just above `value`."""
    below = value // step * step
    if below >= 1:
        yield {key: below}
    yield {key: below + step}


def other_clusters(at: RuleContext) -> Iterator[Fix]:
    """Yield fixes of more or fewer nodes, then of fewer devices per node, that hold the layout and divide the batch."""
    nodes, per_node = at.spec.cluster.nodes, at.spec.cluster.devices_per_node
    if not (_wanted.get() and isinstance(nodes, int) and isinstance(per_node, int)):
        return
    unit, samples = smallest_world(at.spec.parallel), batch_gcd(at.spec)

    def legal(world: int) -> bool:
        return world % unit == 0 and samples % (world // at.model_parallel_size) == 0

    yield from nearest("cluster.nodes", nodes, lambda n: legal(n * per_node), 1)
    step = unit // gcd(unit, nodes)  # so many devices more per node are a multiple of `unit` more in all
    largest = (per_node - 1) // step * step
    candidates = range(largest, max(largest - _SPAN * step, 0), -step)
    fewer = next((n for n in candidates if legal(nodes * n)), None)
    if fewer is not None:
        yield {"cluster.devices_per_node": fewer}
