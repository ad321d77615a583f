"""The tables of events and exit codes are what the code writes: every writer is found in the source and compared."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import megalaunch
from megalaunch.rundir.events import EVENTS, EventName
from megalaunch.rundir.outcome import EXIT_MEANINGS, ExitCode

PACKAGE = Path(megalaunch.__file__).parent
WRITERS = {"record_event": 1, "event": 0, "record": 0, "_record": 0}
"""Functions that append an event, and the position of its name."""


@cache
def calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the package, with its file."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]


def event_sites(name: str) -> Iterator[tuple[str, frozenset[str]]]:
    """The place and the fields of every call that writes an event of this name."""
    for path, call in calls():
        if written_name(call) == name:
            fields = frozenset(keyword.arg or "**" for keyword in call.keywords)
            yield f"{path.relative_to(PACKAGE)}:{call.lineno}", fields


def written_name(call: ast.Call) -> object:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    position = WRITERS.get(str(function))
    if position is None or len(call.args) <= position:
        return None
    argument = call.args[position]
    return argument.value if isinstance(argument, ast.Constant) else None


def test_the_table_names_every_event():
    assert get_args(EventName) == tuple(EVENTS)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_has_the_fields_of_its_table(name):
    sites, kind = list(event_sites(name)), EVENTS[name]
    assert sites, f"nothing writes {name}"
    assert not set(kind.fields) & {"time", "event"}
    for place, fields in sites:
        assert set(kind.fields) <= fields <= {*kind.fields, *kind.optional}, place
    assert frozenset().union(*(fields for _, fields in sites)) == {*kind.fields, *kind.optional}


def test_an_event_is_written_by_its_name():
    """Only functions that pass a name on, and the agents' own logs, may write one that is no constant."""
    for path, call in calls():
        if getattr(call.func, "id", "") == "record_event" and call.args:
            argument = call.args[1]
            assert isinstance(argument, ast.Constant) or argument.id in ("name", "event"), f"{path}:{call.lineno}"


def test_every_exit_code_has_a_meaning():
    assert list(EXIT_MEANINGS) == list(ExitCode)
    for code, meaning in EXIT_MEANINGS.items():
        assert meaning.title, code
        assert meaning.cause.endswith("."), code
        assert meaning.action, code


def test_commands_exit_with_a_code_of_the_table():
    """A number in place of an ExitCode is one of the table; 1 is left to Python's own errors and killed helpers."""
    numbers = {int(code) for code in ExitCode}
    for path, call in calls():
        if "cli" not in path.parts and "runs" not in path.parts:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        if name in ("Exit", "exit") and call.args and isinstance(call.args[0], ast.Constant):
            assert call.args[0].value in numbers, f"{path}:{call.lineno}"
