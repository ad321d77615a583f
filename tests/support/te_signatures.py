"""Signatures of Transformer Engine: read from the Python sources of its wheels, and kept in a file of the tests.

To add a version: `pip download --no-deps transformer_engine==VERSION`, then with the wheels of all versions to keep
`python tests/support/te_signatures.py WHEEL...`. Nothing of a wheel is imported: that needs CUDA.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).with_suffix(".json")
OLDEST = "2.9.0"  # that the extra `te` of pyproject.toml allows
PATHS = (
    *("pytorch.Linear", "pytorch.Linear.forward", "pytorch.LayerNormLinear", "pytorch.LayerNormLinear.forward"),
    *("pytorch.GroupedLinear", "pytorch.GroupedLinear.forward", "pytorch.LayerNorm", "pytorch.LayerNorm.forward"),
    *("pytorch.RMSNorm", "pytorch.RMSNorm.forward", "pytorch.autocast", "pytorch.fp8_autocast"),
    *("pytorch.DotProductAttention", "pytorch.DotProductAttention.forward"),
    "pytorch.DotProductAttention.set_context_parallel_group",
    *("common.recipe.DelayedScaling", "common.recipe.Float8CurrentScaling", "common.recipe.Float8BlockScaling"),
    *("common.recipe.MXFP8BlockScaling", "common.recipe.Format", "common.recipe.Format.E4M3"),
    "common.recipe.Format.HYBRID",
    *(
        f"pytorch.{layer}.{name}"
        for layer in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention")
        for name in ("init_fp8_metadata", "get_fp8_meta_tensors", "reset_fp8_meta_tensors")
    ),
)
"""What is kept, without the prefix `transformer_engine.`: functions, classes, their methods and class attributes."""

Signature = dict[str, str | None]
"""The parameters in order, each with its default: "..." of one that is computed, None without one.

A parameter of keywords is called "**NAME"; a class attribute has no parameters.
"""

Definition = ast.FunctionDef | ast.ClassDef


@cache
def published() -> dict[str, dict[str, Signature]]:
    """The signatures by version, the oldest first, and by path."""
    return json.loads(FILE.read_text())


def modules_with(signatures: Mapping[str, Signature], version: str) -> dict[str, Any]:
    """The modules of Transformer Engine by name: their members have signatures, and cannot be called."""
    root = SimpleNamespace(__version__=version)
    for path, signature in signatures.items():
        *owners, name = path.split(".")
        owner: Any = root
        for each in owners:
            if not hasattr(owner, each):
                setattr(owner, each, SimpleNamespace())
            owner = getattr(owner, each)
        setattr(owner, name, _Published(signature))
    modules = {"": root, ".pytorch": root.pytorch, ".common": root.common, ".common.recipe": root.common.recipe}
    return {f"transformer_engine{name}": module for name, module in modules.items()}


class _Published:
    """What `inspect.signature` reads."""

    def __init__(self, signature: Signature) -> None:
        keyword, rest = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
        parameters = [
            inspect.Parameter(name.lstrip("*"), rest if name.startswith("**") else keyword) for name in signature
        ]
        self.__signature__ = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def __call__(self) -> None:
        raise AssertionError("there is a signature only")


def signatures_in(read: Callable[[str], str | None]) -> dict[str, Signature]:
    """Return the signatures of all PATHS that there are; `read` returns the text of a module, None if there is none."""
    sources, found = _Sources(read), {}
    for path in PATHS:
        module = "common.recipe" if path.startswith("common.") else "pytorch"
        signature = sources.signature(f"transformer_engine.{module}", *_names(path))
        if signature is not None:
            found[path] = signature
    return found


def signatures_of_file(path: Path) -> dict[str, Signature]:
    """Return those signatures of PATHS whose last names a file defines."""
    sources, found = _Sources({path.stem: path.read_text()}.get), {}
    for each in PATHS:
        signature = sources.signature(path.stem, *_names(each))
        if signature is not None:
            found[each] = signature
    return found


def _names(path: str) -> list[str]:
    """Return a path without its module."""
    return path.removeprefix("pytorch.").removeprefix("common.recipe.").split(".")


class _Sources:
    """Python modules as text."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._parse = cache(lambda module: None if (text := read(module)) is None else ast.parse(text))

    def signature(self, module: str, name: str, member: str | None = None) -> Signature | None:
        """Return the signature of what a module defines or imports by a name, or of a member of this class.

        That of a class without a constructor has the fields of the class.
        """
        found = self._definition(module, name)
        if found is None:
            return None
        place, definition = found
        if isinstance(definition, ast.FunctionDef):
            return _parameters(definition)
        classes = [each for _, each in self._with_bases(place, definition)]
        if member is None:
            return _constructor(classes)
        for each in classes:
            for node in each.body:
                if isinstance(node, ast.FunctionDef) and node.name == member:
                    return _parameters(node)
                if isinstance(node, ast.Assign) and member in map(ast.unparse, node.targets):
                    return {}
        return None

    def _definition(self, module: str, name: str) -> tuple[str, Definition] | None:
        tree = self._parse(module)
        for node in () if tree is None else ast.walk(tree):
            if isinstance(node, Definition) and node.name == name and node in tree.body:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name != "*" and (alias.asname or alias.name) != name:
                        continue
                    wanted = name if alias.name == "*" else alias.name
                    if (found := self._definition(self._imported(module, node), wanted)) is not None:
                        return found
        return None

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = self._parse(f"{module}.__init__") is not None
        parts = parts[: len(parts) - node.level + int(is_package)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _with_bases(self, module: str, definition: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        yield module, definition
        for base in definition.bases:
            found = self._definition(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._with_bases(found[0], found[1])


def _constructor(classes: list[ast.ClassDef]) -> Signature:
    """Return the parameters of the constructor of a class, given with its bases, or the fields of a dataclass.

    Keywords that it gives to a base class are those of the base class.
    """
    signature: Signature = {}
    for each in classes:
        for node in each.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                own = _parameters(node)
                rest = [name for name in own if name.startswith("**")]
                signature |= {name: default for name, default in own.items() if name not in (*signature, *rest)}
                if not rest:
                    return signature
    return signature or _fields(classes[0])


def _parameters(function: ast.FunctionDef) -> Signature:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    defaults = [*[None] * (len(names) - len(given.defaults)), *map(_default, given.defaults)]
    signature = dict(zip(names, defaults, strict=True))
    if given.vararg is not None:
        signature[f"*{given.vararg.arg}"] = None
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        signature[argument.arg] = None if default is None else _default(default)
    if given.kwarg is not None:
        signature[f"**{given.kwarg.arg}"] = None
    signature.pop("self", None)
    return signature


def _fields(definition: ast.ClassDef) -> Signature:
    """Return the fields of a dataclass."""
    fields = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(each.target): None if each.value is None else _default(each.value) for each in fields}


def _default(value: ast.expr) -> str:
    is_plain = isinstance(value, ast.Constant | ast.Attribute | ast.Name | ast.Tuple | ast.UnaryOp)
    return ast.unparse(value) if is_plain else "..."


def _of_wheel(path: Path) -> tuple[str, dict[str, Signature]]:
    """Return the version of a wheel and the signatures in it."""
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())

        def read(module: str) -> str | None:
            stem = module.replace(".", "/")
            chosen = [name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in names]
            return wheel.read(chosen[0]).decode() if chosen else None

        return path.name.split("-")[1], signatures_in(read)


def _write(wheels: list[Path]) -> None:
    versions = sorted(map(_of_wheel, wheels), key=lambda each: [int(part) for part in re.findall(r"\d+", each[0])])
    blocks = []
    for version, signatures in versions:
        lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(each)}" for path, each in signatures.items())
        blocks.append(f"{json.dumps(version)}: {{\n{lines}\n}}")
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    _write([Path(name) for name in sys.argv[1:]])
