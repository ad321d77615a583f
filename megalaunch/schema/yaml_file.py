"""Read a YAML file as plain data, with the line and column of each key.

Tags, anchors, duplicate keys, `_target_` and unbounded files are rejected: a recipe is data, never code.
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
MAX_VALUES = 5000
MAX_DIGITS = 400
_SCALARS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str")}
_NO_ANCHORS = "anchors and aliases (& and *) are not supported; write the value itself"
_TAG_PROBLEM = "the tag {} is not supported: configuration files contain plain data only"
_INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)


class YamlProblem(ValueError):
    """The file is not plain data; `where` is `file:line:column`."""

    def __init__(self, where: str, message: str) -> None:
        self.where, self.message = where, message
        super().__init__(f"{where}: {message}")


@dataclass(frozen=True)
class YamlFile:
    """Plain data, and the `file:line:column` of every key by dotted path (list items count from 0)."""

    path: Path
    text: str
    data: dict[str, Any]
    positions: Mapping[str, str] = field(default_factory=dict)

    def position(self, path: str) -> str:
        """Return the position of a key; the file alone for a path that is not in it."""
        return self.positions.get(path, str(self.path))


class _Refusal(yaml.MarkedYAMLError):
    """A YAML feature that is rejected here."""


class _Loader(yaml.SafeLoader):
    """The safe loader, but 1e-3 is a number, dates and 1:30 (base 60 in YAML 1.1) are text, anchors are rejected."""

    yaml_implicit_resolvers = {  # a copy without dates and numbers
        first: [(tag, pattern) for tag, pattern in rows if not tag.endswith((":timestamp", ":int", ":float"))]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Reject anchors and aliases before they are expanded: a few lines of them can expand without bound.

        Too many values and too deep nesting are rejected before they are read.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.nodes += 1
        self.depth += 1
        refusal = ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            refusal = _NO_ANCHORS
        elif self.nodes > MAX_VALUES:
            refusal = f"has more than {MAX_VALUES:,} keys and values"
        elif self.depth > MAX_DEPTH + 2:
            refusal = f"is nested deeper than {MAX_DEPTH} levels"
        if refusal:
            raise _Refusal(problem=refusal, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{_INT.pattern})$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


def load_yaml(path: Path, shown: str | None = None, max_bytes: int = MAX_BYTES) -> YamlFile:
    """Read one file; raises YamlProblem with file, line and column. `shown` repositions the path in messages."""
    name = shown or str(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise YamlProblem(name, f"is {size:,} bytes long; the limit for configuration files is {max_bytes:,}")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise YamlProblem(name, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise YamlProblem(name, f"is not UTF-8 text (byte {error.start})") from error
    positions: dict[str, str] = {}
    data = _parse(text, name, positions)
    return YamlFile(Path(name), text, data, positions)


def _parse(text: str, name: str, positions: dict[str, str]) -> dict[str, Any]:
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return {}
            data = _value(loader, root, name, "", positions, 0)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise YamlProblem(*_yaml_error(error, name, text)) from error
    if not isinstance(data, dict):
        raise YamlProblem(_where(name, root), "must consist of `key: value` lines")
    return data


def _value(loader: _Loader, node: yaml.Node, name: str, path: str, positions: dict[str, str], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise YamlProblem(_where(name, node), f"is nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.MappingNode):
        _refuse_tag(node, "tag:yaml.org,2002:map", name)
        return _mapping(loader, node, name, path, positions, depth)
    if isinstance(node, yaml.SequenceNode):
        _refuse_tag(node, "tag:yaml.org,2002:seq", name)
        items = []
        for index, item in enumerate(node.value):
            item_path = f"{path}.{index}"
            positions[item_path] = _where(name, item)
            items.append(_value(loader, item, name, item_path, positions, depth + 1))
        return items
    if node.tag not in _SCALARS:
        raise YamlProblem(_where(name, node), _TAG_PROBLEM.format(node.tag.replace("tag:yaml.org,2002:", "!!")))
    if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
        raise YamlProblem(_where(name, node), f"is a number of {len(node.value):,} digits; the limit is {MAX_DIGITS}")
    try:
        return loader.construct_object(node)
    except ValueError as error:
        raise YamlProblem(_where(name, node), f"cannot be read as a value: {error}") from error


def _mapping(
    loader: _Loader, node: yaml.MappingNode, name: str, path: str, positions: dict[str, str], depth: int
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value
        if not isinstance(key, str) or key_node.tag not in _SCALARS:
            raise YamlProblem(_where(name, key_node), "a key must be a plain string")
        if re.fullmatch(r"_(?!self_|global_).*_", key):
            problem = f"the key {key!r} is not supported: configuration files cannot name code to run"
            raise YamlProblem(_where(name, key_node), problem)
        if key in values:
            raise YamlProblem(_where(name, key_node), f"the key {key!r} is given twice")
        key_path = f"{path}.{key}" if path else key
        positions[key_path] = _where(name, key_node)
        values[key] = _value(loader, value_node, name, key_path, positions, depth + 1)
    return values


def _refuse_tag(node: yaml.Node, expected: str, name: str) -> None:
    if node.tag != expected:
        raise YamlProblem(_where(name, node), _TAG_PROBLEM.format(node.tag.replace("tag:yaml.org,2002:", "!!")))


def _where(name: str, item: Any) -> str:
    mark = item.start_mark
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _yaml_error(error: yaml.YAMLError, name: str, text: str) -> tuple[str, str]:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        message = error.problem if isinstance(error, _Refusal) else f"is not valid YAML: {error.problem}"
        return f"{name}:{mark.line + 1}:{mark.column + 1}", str(message)
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position)
        column = error.position - (text.rfind("\n", 0, error.position) + 1)
        return (
            f"{name}:{line + 1}:{column + 1}",
            f"is not valid YAML: the character #x{ord(text[error.position]):04x} is not allowed",
        )
    return name, f"is not valid YAML: {error}"
