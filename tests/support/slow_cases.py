"""Cases of a parametrized test: a few run every time, more under `scripts/test --all`, all of them before a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_but(
    cases: Iterable[Any], *quick: Any, slow: Iterable[Any] = (), every: Iterable[Any] | None = None, one_in: int = 1
) -> list[Any]:
    """Return the cases in order, each marked slow that is not among `quick`.

    Those of `slow` run under --all. Of the rest, with `every` all others, and with `one_in` all but one in so many,
    run only before a release.
    """
    listed, kept = list(cases), list(slow)
    others = [case for case in listed if case not in quick and case not in kept]
    daily = [*kept, *(others[::one_in] if every is None else every)]
    unknown = [case for case in (*quick, *daily) if case not in listed]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in quick else _marked(case, is_released=case not in daily) for case in listed]


def covering(cases: Iterable[Any], traits: Callable[[Any], set[Any]], besides: Iterable[Any] = ()) -> list[Any]:
    """Return few cases that with those of `besides` have every trait that any case has: the most new traits first."""
    left, chosen = list(cases), []
    missing = set().union(*map(traits, left)).difference(*map(traits, besides))
    while missing:
        best = max(left, key=lambda case: len(traits(case) & missing))
        chosen.append(best)
        missing -= traits(best)
    return chosen


def rotating(firsts: Iterable[Any], seconds: Iterable[Any], turns: int) -> list[Any]:
    """Return one pair in `turns`: each first case meets every `turns`-th second one, and each second one likewise."""
    others = list(seconds)
    return [
        (first, second)
        for row, first in enumerate(firsts)
        for column, second in enumerate(others)
        if (row + column) % turns == 0
    ]


def _marked(case: Any, is_released: bool) -> Any:
    marks = [pytest.mark.slow, *([pytest.mark.release] if is_released else [])]
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
