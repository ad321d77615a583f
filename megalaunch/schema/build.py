"""Build the typed, frozen run spec from plain nested mappings, and report every problem at once."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megalaunch.schema.setting import LARGEST_FLOAT, LARGEST_INTEGER

T = TypeVar("T")
_EXACT = 2**53  # a larger float may represent several integers


@dataclass(frozen=True)
class SpecProblem:
    """An invalid value. `path` is its dotted key (`train.steps`), `where` a file:line:column or the command line."""

    path: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" ({self.where})" if self.where else "")


class SpecError(ValueError):
    """The mapping is not a valid run spec; `problems` has every reason."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


@cache
def resolve_annotations(section: type) -> dict[str, Any]:
    """Return the resolved annotations of a dataclass, by field name."""
    return get_type_hints(section)


def leaves(section: type, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield every leaf of a spec dataclass as (dotted path, annotation, field), in schema order."""
    for entry in fields(section):
        annotation = resolve_annotations(section)[entry.name]
        path = f"{prefix}{entry.name}"
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield from leaves(annotation, f"{path}.")
        else:
            yield path, annotation, entry


def build_section(section: type[T], data: Any, prefix: str = "") -> T:
    """Build one dataclass from a mapping; raises SpecError with every problem below `prefix`."""
    problems: list[SpecProblem] = []
    value: T = _section(section, data, prefix, problems)
    if problems:
        raise SpecError(problems)
    return value


@cache
def _leaf_table(section: type) -> dict[str, tuple[Any, Field[Any]]]:
    return {path: (annotation, entry) for path, annotation, entry in leaves(section)}


def check_leaves(section: type, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of leaves, typed; None if a path is no leaf. Raises SpecError with every invalid value."""
    table, problems = _leaf_table(section), list[SpecProblem]()
    if any(path not in table or value == "???" for path, value in values.items()):
        return None
    typed = {path: _leaf(table[path][0], value, table[path][1], path, problems) for path, value in values.items()}
    if problems:
        raise SpecError(problems)
    return typed


def did_you_mean(name: str, known: list[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest known name, or ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _section(section: type, data: Any, prefix: str, problems: list[SpecProblem]) -> Any:
    path = prefix.rstrip(".") or "(top)"
    if not isinstance(data, Mapping):
        problems.append(SpecProblem(path, f"must be a mapping of keys, got {_format_value(data)}"))
        return None
    known = {entry.name: entry for entry in fields(section)}
    for key in data:
        if key not in known:
            problems.append(SpecProblem(f"{prefix}{key}", f"unknown key{did_you_mean(str(key), list(known))}"))
    values = {}
    before = len(problems)
    for name, entry in known.items():
        annotation = resolve_annotations(section)[name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            values[name] = _section(annotation, data.get(name, {}), f"{prefix}{name}.", problems)
        elif name in data and data[name] != "???":
            values[name] = _leaf(annotation, data[name], entry, f"{prefix}{name}", problems)
        elif entry.default is MISSING:
            problems.append(SpecProblem(f"{prefix}{name}", f"has no value ({entry.metadata['meaning'].rstrip('.')})"))
    return section(**values) if len(problems) == before else None


def _leaf(annotation: Any, value: Any, entry: Field[Any], path: str, problems: list[SpecProblem]) -> Any:
    for option in _options(annotation):
        fits, typed = _convert(option, value)
        if fits:
            problems += [SpecProblem(path, message) for message in _out_of_bounds(typed, entry)]
            return typed
    problems.append(
        SpecProblem(
            path, f"must be {describe(annotation)}, got {_format_value(value)}{_choice_hint(annotation, value)}"
        )
    )
    return None


def _out_of_bounds(typed: Any, entry: Field[Any]) -> Iterator[str]:
    """Yield a message for each number, or item of a list, that is outside the field's limits."""
    minimum = entry.metadata["minimum"]
    for number in typed if isinstance(typed, tuple) else (typed,):
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if minimum is not None and number < minimum:
            yield f"must be at least {minimum}, got {_format_value(number)}"
        maximum = largest(entry, type(number))
        if number > maximum:
            yield f"must be at most {maximum:,}, got {_format_value(number)}"


def largest(entry: Field[Any], kind: type) -> float:
    """Return the maximum of a field, or the default maximum of its type if it declares none."""
    declared: float | None = entry.metadata["maximum"]
    if declared is not None:
        return declared
    return LARGEST_INTEGER if kind is int else LARGEST_FLOAT


def _options(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _convert(option: Any, value: Any) -> tuple[bool, Any]:
    if option is type(None):
        return value is None, None
    if get_origin(option) is Literal:
        return value in get_args(option) and not isinstance(value, bool), value
    if get_origin(option) is tuple:
        return _items(get_args(option)[0], value)
    if option is bool:
        return isinstance(value, bool), value
    if isinstance(value, bool):
        return False, None
    if option is int:
        return _to_integer(value)
    if option is float:
        return _finite(value)
    return isinstance(value, option), value


def _items(kind: Any, value: Any) -> tuple[bool, tuple[Any, ...] | None]:
    if not isinstance(value, (list, tuple)):
        return False, None
    converted = [_convert(kind, item) for item in value]
    return all(fits for fits, _ in converted), tuple(item for _, item in converted)


def _to_integer(value: Any) -> tuple[bool, Any]:
    """Convert to an integer; a float without a fraction is accepted, as YAML and Hydra read 1e3 as a float."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT:
        return True, int(value)
    return isinstance(value, int), value


def _finite(value: Any) -> tuple[bool, float | None]:
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # an integer larger than every float
        return False, None
    return math.isfinite(number), number


def describe(annotation: Any) -> str:
    """Describe an annotation for users: `an integer or null`."""
    return " or ".join(_describe_value(option) for option in _options(annotation))


def _describe_value(option: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if get_origin(option) is Literal:
        return " | ".join(str(choice) for choice in get_args(option))
    if get_origin(option) is tuple:
        return f"a list of ({_describe_value(get_args(option)[0])})"
    return names[option]


def literal_choices(annotation: Any) -> list[str]:
    """Return the values of an annotation that can be listed: the choices of a Literal, true and false."""
    choices: list[str] = []
    for option in _options(annotation):
        choices += [str(choice) for choice in get_args(option)] if get_origin(option) is Literal else []
        choices += ["true", "false"] if option is bool else []
    return choices


def _choice_hint(annotation: Any, value: Any) -> str:
    return did_you_mean(str(value), literal_choices(annotation)) if isinstance(value, str) else ""


def _format_value(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
