"""Every number of the run spec has a smallest and a largest value, with which a check ends, and soon."""

import math
import time
from typing import get_args, get_origin

import pytest
from made_specs import LAPTOP

from megalaunch.config.compose import compose
from megalaunch.config.errors import ConfigError
from megalaunch.plan.check import check
from megalaunch.plan.resolve import resolve
from megalaunch.plan.summary import derived_values
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.build import check_leaves, largest, leaves

NUMBERS = {
    path: (kind, entry, get_origin(annotation) is tuple)
    for path, annotation, entry in leaves(RunSpec)
    for kind in (int, float)
    if kind in {annotation, *get_args(annotation)}
}


def test_there_are_numbers_of_both_kinds():
    kinds = [kind for kind, _, _ in NUMBERS.values()]
    assert len(kinds) > 90
    assert {int, float} == set(kinds)


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_has_bounds(path):
    kind, entry, is_list = NUMBERS[path]
    most, least = largest(entry, kind), entry.metadata["minimum"]
    assert least is not None
    assert math.isfinite(most)

    def given(number):
        return {path: (number,) if is_list else number}

    assert check_leaves(RunSpec, given(kind(most))) == given(kind(most))
    for wrong, said in ((kind(most * 2), "must be at most"), (kind(1e200), "must be at most"), (least - 1, "at least")):
        with pytest.raises(SpecError, match=rf"{path}: must be .*{said.removeprefix('must be ')}"):
            check_leaves(RunSpec, given(wrong))


def test_a_number_beyond_its_bound_is_refused_by_name():
    with pytest.raises(ConfigError) as refused:
        compose(["recipe=tiny", "cluster.nodes=1000000000", "train.steps=99999999999999999999999"])
    said = {problem.path: problem.message for problem in refused.value.problems}
    assert said["cluster.nodes"].startswith("must be at most 100,000, got 1000000000")
    assert said["train.steps"].startswith("must be at most 1,000,000,000, got 99999999999999999999999")


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.nodes=100000", "cluster.devices_per_node=4096", "platform=h100"),
        ("train.steps=1000000000", "batch.global_batch_size=1000000000", "batch.sequence_length=1000000000"),
        ("parallel.pp=1000000000",),
        ("parallel.pp=2", "batch.global_batch_size=999999998", "batch.micro_batch_size=null"),
    ],
)
def test_a_check_at_the_bounds_ends(overrides):
    composition = compose(["recipe=tiny", "data.corpus=x", *overrides])
    began = time.process_time()
    resolution = resolve(composition.spec, LAPTOP, "tiny")
    check(resolution.spec, composition.origins, machine=LAPTOP)
    derived_values(resolution.spec)
    assert time.process_time() - began < 20
