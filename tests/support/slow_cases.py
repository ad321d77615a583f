"""Cases of a parametrized test: a few run every time, all of them under `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return the cases in order, each marked slow that is not among `quick`."""
    listed = list(cases)
    unknown = [case for case in quick if case not in listed]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in quick else _slow(case) for case in listed]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
