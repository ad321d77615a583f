"""Suggest valid numbers near an invalid one: candidates for fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megalaunch.plan.rules.registry import Fix

_SPAN = 1024  # the largest distance searched
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
