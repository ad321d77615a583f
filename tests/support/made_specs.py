"""Specs for tests: composed from overrides, resolved on a mock machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megalaunch.config.compose import Composer, Composition
from megalaunch.plan.resolve import resolve
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec

LAPTOP = Machine(CHIPS["cpu"], devices=0, cores=2, memory_bytes=8 * 2**30, notes=(), free_disk=lambda path: 200 * 10**9)
AMX_SERVER = replace(LAPTOP, chip=replace(CHIPS["cpu"], native_bf16="AMX"))
H100_NODE = Machine(CHIPS["h100"], devices=8, cores=64, memory_bytes=2**40, notes=())
COMPOSER = Composer()


@cache
def composed(*overrides: str) -> Composition:
    """Files are read once and Hydra merges once for all tests of a process."""
    return COMPOSER.compose(overrides)


def resolved(*overrides: str, machine: Machine = LAPTOP, stored: RunSpec | None = None) -> tuple[RunSpec, Composition]:
    """The resolved spec of some overrides, and the composition it comes from."""
    composition = composed(*overrides)
    recipe = composition.choices.get("recipe")
    return resolve(composition.spec, machine, recipe, stored).spec, composition
