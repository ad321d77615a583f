"""Replace an attribute of a class or module temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patch(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` within the context."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:  # inherited
            delattr(owner, name)
