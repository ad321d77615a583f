"""Workers that are forked from the agent end as a Python program does."""

from __future__ import annotations

import signal
import sys
from types import ModuleType

import pytest

from megalaunch.engine.agent.forked_workers import import_worker


@pytest.fixture
def handlers_restored():
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGQUIT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fail(arguments: list[str]) -> int:
    raise ValueError(f"told to fail by {arguments[0]}")


@pytest.mark.parametrize(("main", "code"), [(fail, 1), (lambda arguments: 2, 2), (lambda arguments: 0, 0)])
def test_the_traceback_is_printed_and_the_code_returned(main, code, monkeypatch, capsys, handlers_restored):
    """An exception that reached torch would be pickled into the folder of temporary files."""
    worker = ModuleType("a_worker")
    worker.main, worker.load_train_entrypoint = main, lambda: None
    monkeypatch.setitem(sys.modules, "a_worker", worker)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run, ended = import_worker("a_worker"), 0
    try:
        run("run/spec.yaml")
    except SystemExit as end:
        ended = end.code
    assert ended == code
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1:] == (["ValueError: told to fail by run/spec.yaml"] if code == 1 else [])
