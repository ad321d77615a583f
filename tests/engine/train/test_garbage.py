"""Garbage is collected between steps, at fixed ones, and by Python itself outside of the loop."""

from __future__ import annotations

import gc

import pytest

from megalaunch.engine.train.garbage import StepGarbage


@pytest.fixture
def collections(monkeypatch):
    """The generations collected on demand."""
    found = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: found.append(generation) or 0)
    return found


def test_garbage_is_collected_every_fifty_steps(collections):
    with StepGarbage() as garbage:
        assert not gc.isenabled()
        for step in range(1, 101):
            garbage.collect_if_due(step)
    assert collections == [2, 1, 1]
    assert gc.isenabled()


def test_an_error_ends_the_control_too(collections):
    with pytest.raises(RuntimeError), StepGarbage():
        raise RuntimeError
    assert gc.isenabled()
