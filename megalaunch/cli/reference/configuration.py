"""Write docs/reference/configuration.md: every key of a run with type, default, unit, limits and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from megalaunch.config.groups import CONF
from megalaunch.config.keys import GROUPS, SECTIONS, Key, schema_keys
from megalaunch.config.parallel_names import GRAMMAR
from megalaunch.format.yaml_value import to_yaml
from megalaunch.schema import RunSpec
from megalaunch.schema.build import describe, resolve_annotations

_HEAD = """\
# Configuration, key by key

This page is generated: `scripts/reference` writes it from `megalaunch/schema/`, and a test fails when it is
stale.

A run has {count} keys in {sections} sections. An override `SECTION.KEY=VALUE` or a line of a recipe sets one;
`megalaunch validate-config --explain KEY` prints where a value comes from. A key without a default must be set by a
file or an override. If no maximum is stated, it is 1,000,000,000 for an integer and 1e100 for any other number.
[configuration](../configuration.md) describes how overrides and files are combined, [rules](rules.md) lists the checks.
"""


def configuration_page() -> str:
    """Return the page's text."""
    lines = [_HEAD.format(count=len(schema_keys()), sections=len(SECTIONS)), "Sections:", "", *_contents(), ""]
    lines += [*_groups(), ""]
    for path, section in _sections(RunSpec):
        lines += _section(path, section)
    return "\n".join(lines).rstrip() + "\n"


def _contents() -> Iterator[str]:
    for path, section in _sections(RunSpec):
        yield f"{'  ' * path.count('.')}- [`{path}`](#{_anchor(path)}): {_title(section)}"


def _sections(section: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield every section and nested section, by dotted path."""
    for name, annotation in resolve_annotations(section).items():
        if isinstance(annotation, type) and hasattr(annotation, "__dataclass_fields__"):
            yield f"{prefix}{name}", annotation
            yield from _sections(annotation, f"{prefix}{name}.")


def _anchor(path: str) -> str:
    return path.replace(".", "-")


def _title(section: type) -> str:
    return (section.__doc__ or "").strip().partition("\n")[0]


def _groups() -> Iterator[str]:
    yield "## Groups"
    yield ""
    yield f"`GROUP=OPTION` picks a file of values for one section. `parallel` also takes names: {GRAMMAR}."
    yield ""
    yield "| group | options |"
    yield "| --- | --- |"
    for group in GROUPS:
        names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        yield f"| `{group}` | {', '.join(f'`{name}`' for name in names)} |"


def _section(path: str, section: type) -> list[str]:
    keys = [key for key in schema_keys().values() if key.path.rpartition(".")[0] == path]
    lines = [f'<a id="{_anchor(path)}"></a>', "", f"## `{path}`", "", " ".join((section.__doc__ or "").split()), ""]
    if not keys:
        return lines
    lines += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    return [*lines, *(_row(key) for key in keys), ""]


def _row(key: Key) -> str:
    meaning = key.field.metadata["meaning"]
    cells = [f"`{key.path.rpartition('.')[2]}`", _takes(key), _default(key), meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _takes(key: Key) -> str:
    unit, low, high = (key.field.metadata[name] for name in ("unit", "minimum", "maximum"))
    kind = describe(key.annotation)
    bounds = _bounds(low, high)
    return f"{kind}{f' [{unit}]' if unit else ''}{f', {bounds}' if bounds else ''}"


def _bounds(low: Any, high: Any) -> str:
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"at least {low}"
    return "" if high is None else f"at most {high}"


def _default(key: Key) -> str:
    default = key.field.default
    return "required" if default is MISSING else f"`{to_yaml(default)}`"
