"""Numbers near a wrong one that would be right: the raw material of fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megalaunch.plan.rules.registry import Fix

_SPAN = 1024  # how far to look
_wanted: ContextVar[bool] = ContextVar("fixes are wanted", default=True)


@contextmanager
def suggestions_disabled() -> Iterator[None]:
    """While a fix is proven only findings count: looking for further fixes would take most of the time."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


def suggestions_enabled() -> bool:
    """False while a fix is proven, for rules whose fixes take time to find."""
    return _wanted.get()


def nearest(key: str, value: int, legal: Callable[[int], bool], count: int = 3) -> Iterator[Fix]:
    """Fixes `key=n` for the `count` legal n >= 1 nearest to `value`, smaller ones first when equally near."""
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
    """Fixes `key=n` for the multiples of `step` just below and just above `value`."""
    below = value // step * step
    if below >= 1:
        yield {key: below}
    yield {key: below + step}
