"""Write docs/reference/api.md: the public API with signatures and docstrings, read from the sources, not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import megalaunch

_HEAD = """\
# API

This page is generated: `scripts/reference` writes it from the docstrings, and a test fails when it is stale.
[library.md](../library.md) says how the names work together and how stable they are.
"""
_PACKAGE = Path(megalaunch.__file__).parent
_Definition = ast.FunctionDef | ast.ClassDef
_OPERATORS = ("__call__", "__getitem__", "__len__")
"""Special methods that are part of an interface."""


def api_page() -> str:
    """Return the page's text."""
    blocks = [_HEAD, "## `megalaunch`\n", *_sections(megalaunch.public_modules())]
    blocks += ["## `megalaunch.nn`\n", *_sections(_imported(_PACKAGE / "nn.py"))]
    return "\n".join(blocks).rstrip() + "\n"


def _imported(path: Path) -> Mapping[str, str]:
    """Return the names that a module of re-exports imports, each with the module that defines it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("megalaunch.")
            found.update({alias.name: module for alias in node.names})
    return found


def _sections(modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the section of each name, sorted without regard to case."""
    for name, module in sorted(modules.items(), key=lambda entry: entry[0].lower()):
        yield _section(name, module)


def _section(name: str, module: str) -> str:
    """Return heading, signature and docstring of one name, from the module that defines it."""
    path = _PACKAGE.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return "\n".join([f"### `{name}`", "", *_definition(node)])
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            following = tree.body[number + 1] if number + 1 < len(tree.body) else None
            lines = _code(f"{name} = {ast.unparse(node.value)}" if node.value is not None else name)
            return "\n".join([f"### `{name}`", "", *lines, *_text(_string(following))])
    again = _imported(path).get(name)
    if again is not None:
        return _section(name, again)
    raise ValueError(f"{name} is not defined where megalaunch imports it from")


def _definition(node: _Definition) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield from _code(_signature(node))
        yield from _text(ast.get_docstring(node))
        return
    constructor = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target)[0] != "_"]
    lines = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    lines += [f"    {field}" for field in fields]
    lines += [] if constructor is None else [f"    {_signature(constructor)}"]
    yield from _code("\n".join(lines))
    yield from _text(ast.get_docstring(node))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and (method.name[0] != "_" or method.name in _OPERATORS):
            summary = (ast.get_docstring(method) or "").partition("\n\n")[0].replace("\n", " ")
            accessor = any(ast.unparse(d) in ("property", "cached_property") for d in method.decorator_list)
            yield f"- `{method.name if accessor else _call(method)}`: {_escape(summary)}"
    yield ""


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{_call(node)}{returns}"


def _call(node: ast.FunctionDef) -> str:
    return f"{node.name}({ast.unparse(node.args)})"


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [ast.unparse(target) for target in targets]


def _string(node: ast.stmt | None) -> str | None:
    """Return the text of a string that stands alone, as below a constant."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return None


def _code(text: str) -> list[str]:
    return ["```python", *text.splitlines(), "```", ""]


def _text(docstring: str | None) -> list[str]:
    """Return a docstring as Markdown; indented blocks, such as Args, become lists."""
    lines: list[str] = []
    for line in (docstring or "").splitlines():
        stripped = line.strip()
        deep = len(line) - len(line.lstrip())
        if deep == 4 and ": " in stripped:
            argument, _, meaning = stripped.partition(": ")
            lines.append(f"- `{argument}`: {_escape(meaning)}")
        elif deep and stripped:
            lines.append(f"  {_escape(stripped)}")
        else:
            lines += (
                [f"**{stripped}**", ""]
                if stripped in ("Args:", "Returns:", "Raises:", "Attributes:")
                else [_escape(stripped)]
            )
    return [*lines, ""]


def _escape(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")
