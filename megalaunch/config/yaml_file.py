"""Reads a YAML file as pure data, and remembers on which line each key stands.

Tags, anchors, duplicate keys, `_target_` and endless files are refused: a recipe is data, never code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 64 * 1024
MAX_DEPTH = 12
_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}
_NO_ANCHORS = "anchors and aliases (& and *) are not used here; write the value itself"
_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)(?:\.[\d_]*)?[eE][-+]?\d+")


class YamlProblem(ValueError):
    """The file is no plain data; `where` is `file:line:column`."""

    def __init__(self, where: str, message: str) -> None:
        self.where, self.message = where, message
        super().__init__(f"{where}: {message}")


@dataclass(frozen=True)
class YamlFile:
    """Plain data, and the `file:line:column` of every key by dotted path (list items count from 0)."""

    path: Path
    text: str
    data: dict[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """Where the key stands; the file alone for a path that is not in it."""
        return self.places.get(path, str(self.path))


class _Loader(yaml.SafeLoader):
    """The safe loader, with 1e-3 read as a number, dates left as text, and no anchors."""

    yaml_implicit_resolvers = {  # a copy without dates
        first: [(tag, pattern) for tag, pattern in rows if not tag.endswith(":timestamp")]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse anchors and aliases before they are followed: a few lines of them can unfold without end."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem=_NO_ANCHORS, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def load_yaml(path: Path, shown: str | None = None) -> YamlFile:
    """Read one file; raises YamlProblem with file, line and column. `shown` replaces the path in messages."""
    name = shown or str(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise YamlProblem(name, f"is {size:,} bytes long; a configuration file may have {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise YamlProblem(name, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise YamlProblem(name, f"is no UTF-8 text (byte {error.start})") from error
    places: dict[str, str] = {}
    data = _parse(text, name, places)
    return YamlFile(Path(name), text, data, places)


def _parse(text: str, name: str, places: dict[str, str]) -> dict[str, Any]:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return {}
            data = _value(loader, root, name, "", places, 0)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise YamlProblem(*_yaml_error(error, name)) from error
    except RecursionError as error:
        raise YamlProblem(name, f"is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(data, dict):
        raise YamlProblem(_where(name, root), "needs `key: value` lines at its top")
    return data


def _value(loader: _Loader, node: yaml.Node, name: str, path: str, places: dict[str, str], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise YamlProblem(_where(name, node), f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.MappingNode):
        _refuse_tag(node, "tag:yaml.org,2002:map", name)
        return _mapping(loader, node, name, path, places, depth)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "tag:yaml.org,2002:seq", name)
        items = []
        for index, item in enumerate(node.value):
            item_path = f"{path}.{index}"
            places[item_path] = _where(name, item)
            items.append(_value(loader, item, name, item_path, places, depth + 1))
        return items
    if node.tag not in _SCALARS:
        raise YamlProblem(_where(name, node), f"the tag {_short_tag(node.tag)} is refused: a file here is data only")
    try:
        return loader.construct_object(node)
    except ValueError as error:
        raise YamlProblem(_where(name, node), f"cannot be read as a value: {error}") from error


def _mapping(
    loader: _Loader, node: yaml.MappingNode, name: str, path: str, places: dict[str, str], depth: int
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value
        if not isinstance(key, str) or key_node.tag not in _SCALARS:
            raise YamlProblem(_where(name, key_node), "a key is a plain word")
        if re.fullmatch(r"_(?!self_|global_).*_", key):
            raise YamlProblem(_where(name, key_node), f"the key {key!r} is refused: a file here names no code to run")
        if key in values:
            raise YamlProblem(_where(name, key_node), f"the key {key!r} stands here a second time")
        key_path = f"{path}.{key}" if path else key
        places[key_path] = _where(name, key_node)
        values[key] = _value(loader, value_node, name, key_path, places, depth + 1)
    return values


def _refuse_tag(node: yaml.Node, expected: str, name: str) -> None:
    if node.tag != expected:
        raise YamlProblem(_where(name, node), f"the tag {_short_tag(node.tag)} is refused: a file here is data only")


def _short_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _where(name: str, item: Any) -> str:
    mark = item.start_mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _yaml_error(error: yaml.YAMLError, name: str) -> tuple[str, str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{name}:{mark.line + 1}:{mark.column + 1}", f"is no YAML: {error.problem}"
    return name, f"is no YAML: {error}"
