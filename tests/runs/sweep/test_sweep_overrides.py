"""The overrides of a sweep: what becomes an axis, what is refused, and the points they make."""

from __future__ import annotations

import pytest
from slow_cases import slow_but

from megalaunch.config.compose import Composer, compose, read_axis
from megalaunch.config.errors import ConfigError
from megalaunch.config.search_space import Categorical, Range
from megalaunch.runs.sweep.overrides import parse_sweep
from megalaunch.runs.sweep.sampling import grid, random_points


@pytest.mark.parametrize(
    ("raw", "axis"),
    [
        ("1e-4,3e-4", Categorical(("0.0001", "0.0003"))),
        ("choice(1e-4,3e-4,1e-4)", Categorical(("0.0001", "0.0003"))),
        ("range(1,8,step=3)", Categorical(("1", "4", "7"))),
        ("interval(1e-5,1e-3)", Range(1e-5, 1e-3)),
        ("tag(log,interval(1e-5,1e-3))", Range(1e-5, 1e-3, log=True)),
        ("int(interval(1,5))", Range(1, 5, integer=True)),
        ("int(interval(0,5))", Range(0, 5, integer=True)),
        ("int(interval(-5,0))", Range(-5, 0, integer=True)),
        ("3e-4", None),
    ],
)
def test_an_axis_is_read_as_hydra_reads_it(raw, axis):
    assert read_axis("optimizer.lr", raw) == axis


def test_options_are_named_by_list_and_by_pattern():
    assert read_axis("parallel", "tp1,tp2pp2") == Categorical(("tp1", "tp2pp2"))
    assert read_axis("schedule", "glob(c*)") == Categorical(("constant", "cosine"))
    assert read_axis("data.corpus", "texts[1") is None  # text with a bracket is one value


@pytest.mark.parametrize("raw", ["/my dir/a,/b", "choice('/my dir/a',/b)"])
def test_a_text_with_a_space_is_swept_as_it_is_typed(raw):
    """Hydra writes the space of an unquoted text with a backslash, which is no part of a path."""
    assert read_axis("data.corpus", raw) == read_axis("recipe", raw) == Categorical(("/my dir/a", "/b"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["recipe=tiny"], "no override has several values"),
        (["optimizer.lr=1,2", "optimizer.lr=3"], "given twice"),
        (["optimizer.lr=choice(1,"], "cannot read"),
        (["optimizer.lr=shuffle(choice(1,2,3))"], "--sampler random"),
        (["optimizer.lr=interval(2,1)"], "is empty"),
        (["optimizer.lr=tag(log,interval(0,1))"], "above 0"),
        (["parallel=interval(0,1)"], "takes the name of an option"),
        (["schedule=glob(nothing*)"], "matches no option"),
        (["run.directory=a,b"], "--name"),
        (["run.name=x", "optimizer.lr=1,2"], "--name"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides, said):
    with pytest.raises(ConfigError) as refused:
        parse_sweep(overrides)
    assert said in str(refused.value)


def test_a_point_keeps_the_order_of_overrides():
    swept = parse_sweep(["recipe=tiny", "parallel=tp1,tp2", "train.steps=9", "optimizer.lr=choice(1,2)"])
    assert swept.size == 4
    points = [swept.point(values) for values in grid(swept.axes)]
    assert points[1] == ("recipe=tiny", "parallel=tp1", "train.steps=9", "optimizer.lr=2")
    assert len(set(points)) == 4


def test_random_points_are_the_same_for_the_same_seed_and_never_twice():
    axes = parse_sweep(["optimizer.lr=tag(log,interval(1e-5,1e-2))", "train.steps=int(interval(1,3))"]).axes
    first = [values for values, _ in zip(random_points(axes, 7), range(50), strict=False)]
    again = [values for values, _ in zip(random_points(axes, 7), range(50), strict=False)]
    assert first == again
    assert len({tuple(values.items()) for values in first}) == 50
    assert {values["train.steps"] for values in first} == {"1", "2", "3"}
    assert all(1e-5 <= float(values["optimizer.lr"]) <= 1e-2 for values in first)
    assert sum(float(values["optimizer.lr"]) < 3e-4 for values in first) > 15  # by factor, not by size
    assert [values for values, _ in zip(random_points(axes, 8), range(50), strict=False)] != first


def test_a_finite_space_is_used_up():
    axes = parse_sweep(["parallel=tp1,tp2", "optimizer.lr=1,2"]).axes
    assert len(list(random_points(axes, 0))) == 4


COMPOSED = [
    ["recipe=tiny", "parallel=tp3", "schedule=wsd", "model=quickstart"],
    ["recipe=llama3_8b", "precision=fp32", "platform=b200", "optimizer.lr=1e-3"],
    ["recipe=llama3_8b", "recompute=full", "recompute.num_layers=2"],
    ["recipe=quickstart", "data=none"],
]


@pytest.mark.parametrize(
    "overrides",
    slow_but(COMPOSED, COMPOSED[1]),
)
def test_composing_many_gives_what_composing_one_gives(overrides):
    composer = Composer()
    composer.compose(overrides[:1])
    assert composer.compose(overrides) == compose(overrides)
    assert composer.compose(overrides[:1]) == compose(overrides[:1])  # what came between left no trace


def test_composing_many_finds_the_same_problems():
    composer = Composer()
    composer.compose(["recipe=tiny"])
    for overrides in (["recipe=tiny", "parallel=tp2tp4"], ["recipe=tiny", "train.stepz=1"], ["recipe=nope"]):
        with pytest.raises(ConfigError) as many:
            composer.compose(overrides)
        with pytest.raises(ConfigError) as one:
            compose(overrides)
        assert str(many.value) == str(one.value)
