"""The table of what the engine can run, held to the engine: what it allows trains, what it does not is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import transformer_engine_stand_in as stand_in
from float8_runs import train
from forked_ranks import run_ranks
from made_specs import LAPTOP
from oracle import Numbers, small_spec

from megalaunch.config.keys import schema_keys
from megalaunch.plan.check import check
from megalaunch.plan.resolve import resolve
from megalaunch.plan.supported import LIMITS, Limit, unsupported
from megalaunch.schema import RunSpec, with_values
from megalaunch.schema.paths import value_at

BASE = small_spec(data__mock=True)


EP = {"parallel.dp": 2, "parallel.ep": 2, "model.moe.num_experts": 4}

# Where a limited key means something: what to set beside it.
BESIDE = {
    "recompute.modules": {"recompute.granularity": "selective"},
    "recompute.num_layers": {"recompute.granularity": "full"},
    "parallel.pp": {"parallel.pp": 2, "model.num_layers": 4},
    "parallel.cp": {"parallel.cp": 2},
    "parallel.ep": EP,
    "recompute.method": {"recompute.method": "uniform"},
    "precision.fp8.recipe": {"precision.compute_dtype": "fp8"},
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    for name, module in stand_in.transformer_engine_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def with_limit(limit: Limit, value: Any) -> RunSpec:
    """The small spec with one value of a limited key, in a layout where the key means something."""
    beside = {**BESIDE.get(limit.path, {}), **_fp8_by(limit)}
    asked = with_values(BASE, {**beside, limit.path: _typed(limit, value)})
    p = asked.parallel
    return with_values(asked, {"cluster.devices_per_node": (p.dp or 1) * p.tp * p.pp * p.cp})


def _fp8_by(limit: Limit) -> dict[str, Any]:
    """The value with which the limit applies, in a run that reads it."""
    key, value = limit.condition
    return {"precision.compute_dtype": "fp8", key: value}


def _typed(limit: Limit, value: Any) -> Any:
    """The value, as the only item of a list where the key takes nothing else."""
    key = schema_keys()[limit.path]
    lists_only = get_origin(key.annotation) is tuple and not isinstance(value, tuple | list)
    return (value,) if lists_only else value


def allowed() -> dict[str, RunSpec]:
    """Every value that the table allows, as a resolved spec; what resolves to the same runs once."""
    found = {"as it is": replace(resolve(BASE, LAPTOP, None).spec, run=BASE.run)}
    for limit in LIMITS:
        for value in limit.supported:
            spec = replace(resolve(with_limit(limit, value), LAPTOP, None).spec, run=BASE.run)
            if spec not in found.values():
                found[f"{limit.path}={value}"] = spec
    return found


def refused(limit: Limit) -> Iterator[Any]:
    """Values of the schema that the table does not allow: each choice of a few, an example of a number."""
    key = schema_keys()[limit.path]
    options = [key.annotation, *get_args(key.annotation)]
    for option in options:
        if get_origin(option) is Literal:
            yield from get_args(option)
        elif get_origin(option) is tuple and key.annotation is option:
            yield from get_args(get_args(option)[0])
        elif option is bool:
            yield from (False, True)
        elif option in (int, float):
            yield from (option(key.field.metadata["minimum"] or 0), option(0.5 if option is float else 3))
        elif option is str:
            yield "some text"
    if key.takes_null:
        yield None


# Sections in which a value changes how a step is computed, and not what comes out.
SAME_NUMBERS = ("parallel.", "recompute.", "as it is")
LIBRARIES = ("model.moe.num_experts",)  # a limit of Transformer Engine, whose stand-in computes in fp32


@cache
def trained(name: str) -> Numbers:
    """Three steps and a validation of one of the allowed specs."""
    spec = allowed()[name]
    numbers = run_ranks(spec.cluster.devices_per_node, train, spec, False)[0]
    assert isinstance(numbers, Numbers)
    return numbers


@pytest.mark.parametrize("name", allowed())
def test_what_the_table_allows_trains(name):
    assert not list(unsupported(allowed()[name]))
    numbers = trained(name)
    if not name.startswith((*SAME_NUMBERS, *LIBRARIES)):
        assert numbers.losses != trained("as it is").losses, "the engine ignores it"
    assert numbers.losses[-1] < 1.2 * numbers.losses[0]
    assert all(norm > 0 for norm in numbers.norms)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.path)
def test_what_it_does_not_is_refused_by_the_one_rule(limit):
    values = [value for value in refused(limit) if value not in limit.supported]
    assert values, f"nothing is left to refuse: drop the limit on {limit.path}"
    for value in values:
        spec = with_limit(limit, value)
        assert value_at(spec, limit.path) == _typed(limit, value)
        found = [f for f in check(spec, purpose="train") if f.rule == "engine.unsupported"]
        assert (limit.path, "error") in [(f.path, f.severity) for f in found]
        looked_at = [f for f in check(spec) if f.rule == "engine.unsupported"]
        assert {f.severity for f in looked_at} == {"note"}
