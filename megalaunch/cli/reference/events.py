"""Write docs/reference/events.md: every line that events.jsonl can have, from the table of its writers."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.rundir.events import EVENTS, EventKind

_HEAD = """\
# Events

This page is generated: `scripts/reference` writes it from `megalaunch/rundir/events.py`, and a test fails when it is
stale.

`events.jsonl` in the [run directory](../run_directory.md) has one JSON object a line, in the order of writing: what
happened to a run, over all its launches. Every line has `event`, the name, and `time`, seconds since 1970. Rank 0 is
the worker of that rank. `megalaunch watch` and `megalaunch report` show events as sentences; `megalaunch explain NAME`
prints the fields of one. Fields and events are only [added](../compatibility.md): a reader should pass over those that
it does not know.

```sh
jq -r 'select(.event == "checkpoint") | [.step, .seconds] | @tsv' runs/quickstart/events.jsonl
```

| event | written by | when |
| --- | --- | --- |
"""


def events_page() -> str:
    """Return the page's text."""
    rows = [f"| [`{name}`](#{name}) | {kind.writer} | {kind.when} |" for name, kind in EVENTS.items()]
    sections = [line for name, kind in EVENTS.items() for line in ("", f"## `{name}`", "", *_fields(kind))]
    return _HEAD + "\n".join([*rows, *sections]) + "\n"


def describe_event(name: str) -> str | None:
    """Return an event as text for a terminal; None if there is none of that name."""
    kind = next((kind for known, kind in EVENTS.items() if known == name), None)
    if kind is None:
        return None
    lines = [f"{name}: an event in events.jsonl", "", f"  written by  {kind.writer}", f"  when        {kind.when}", ""]
    width = max(len(field) for field in (*kind.fields, *kind.optional))
    lines += [f"  {field:<{width}}  {meaning}" for field, meaning in (*kind.fields.items(), *kind.optional.items())]
    return "\n".join(lines)


def _fields(kind: EventKind) -> Iterator[str]:
    yield f"Written by {kind.writer}: {kind.when}."
    yield ""
    yield "| field | meaning |"
    yield "| --- | --- |"
    for field, meaning in (*kind.fields.items(), *kind.optional.items()):
        yield f"| `{field}` | {meaning} |"
