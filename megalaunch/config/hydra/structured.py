"""The run spec as an OmegaConf structured config: the same sections, keys, types and defaults.

The dataclasses of the schema are frozen and use `Literal`, which OmegaConf 2.3 does not read; here a Literal becomes
the type of its values. What OmegaConf cannot express (choices, limits) is checked when the spec is built.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin

from megalaunch import schema
from megalaunch.schema.build import resolve_annotations

NAME = "run_spec"
"""The schema's name in Hydra's ConfigStore, and in the defaults list of conf/config.yaml."""


def structured_run_spec() -> type:
    """Return the dataclass of a run spec that OmegaConf understands."""
    return _structured(schema.RunSpec)


def __getattr__(name: str) -> type:
    """Return the structured dataclass of a section by its name, so that a pickled config names its classes.

    A launcher plug-in sends a trial's config to another process and back. cloudpickle sends a class that it cannot
    import as a copy, and reading the copy back overwrites the fields of the class of this process.
    """
    section = _sections(schema.RunSpec).get(name)
    if section is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _structured(section)


def _sections(section: type) -> dict[str, type]:
    found = {section.__name__: section}
    for annotation in resolve_annotations(section).values():
        if is_dataclass(annotation) and isinstance(annotation, type):
            found |= _sections(annotation)
    return found


@cache
def _structured(section: type) -> type:
    made: list[tuple[str, Any, Any]] = []
    for entry in fields(section):
        annotation = resolve_annotations(section)[entry.name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            below = _structured(annotation)
            made.append((entry.name, below, field(default_factory=below)))
        else:
            made.append((entry.name, _plain_type(annotation), _default(entry)))
    structured = make_dataclass(section.__name__, made)
    structured.__module__ = __name__
    return structured


def _default(entry: Field[Any]) -> Any:
    if entry.default is MISSING:
        return field(default="???")
    return field(default_factory=_constant(list(entry.default) if isinstance(entry.default, tuple) else entry.default))


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: list(value) if isinstance(value, list) else value


def _plain_type(annotation: Any) -> Any:
    """Return the OmegaConf type of a leaf: primitives, lists of them, unions of primitives; else Any."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    kinds = {kind for option in options if option is not type(None) for kind in _kinds(option)}
    optional = type(None) in options
    if len(kinds) > 1 and any(get_origin(kind) is list for kind in kinds):
        return Any  # OmegaConf has no union of a list and a primitive
    return reduce(or_, [*sorted(kinds, key=str), *([None] if optional else [])])


def _kinds(option: Any) -> set[Any]:
    if get_origin(option) is Literal:
        return {type(value) for value in get_args(option)}
    if get_origin(option) is tuple:
        (kind,) = _kinds(get_args(option)[0])
        return {types.GenericAlias(list, (kind,))}
    return {option}
