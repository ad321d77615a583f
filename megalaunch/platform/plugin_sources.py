"""Read the sources of a plug-in, which import torch, without importing them: what it overrides, and what is wrong."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class SourceError(Exception):
    """A module is missing, cannot be read, lacks a name, or overrides nothing."""


def decorated_names(module: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the names at the top level of a module that carry `@override`, with the decorator's arguments.

    Raises:
        SourceError: There is none, or an argument is no literal.
    """
    found = []
    for node in _parse(module).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).split(".")[-1] == "override":
                found.append((node.name, _arguments(decorator, module)))
    if not found:
        raise SourceError(f"nothing at the top level of {module} carries @override")
    return found


def _arguments(call: ast.Call, module: str) -> dict[str, Any]:
    """Return the arguments of a decorator by name."""
    try:
        values = {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
        if call.args:
            values["target"] = ast.literal_eval(call.args[0])
    except ValueError as error:
        raise SourceError(
            f"{module}, line {call.lineno}: @override takes literals, which are read without importing it"
        ) from error
    if len(call.args) > 1 or not {"target", "platform"} <= set(values) <= {"target", "platform", "priority"}:
        raise SourceError(f"{module}, line {call.lineno}: @override takes a target, platform= and priority=")
    return values


def mirrored_names(package: str, targets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the targets that a package defines in its modules of the same names, each with its "module:name" there.

    Raises:
        SourceError: The package is missing, a module of a target's name defines no target, or there is none at all.
    """
    _find(package)
    modules = sorted({target.rpartition(".")[0] for target in targets})
    defined = {module: _defined(f"{package}.{module}") for module in modules if _exists(f"{package}.{module}")}
    if not defined:
        raise SourceError(f"{package} has none of the modules {', '.join(modules)}, so it replaces nothing")
    for module, names in defined.items():
        here = [target for target in targets if target.rpartition(".")[0] == module]
        hits = [target for target in here if target.rpartition(".")[2] in names]
        if not hits:
            wanted = ", ".join(target.rpartition(".")[2] for target in here)
            raise SourceError(f"{package}.{module} defines none of {wanted}, so it replaces nothing")
        for target in hits:
            yield target, f"{package}.{module}:{target.rpartition('.')[2]}"


def _defined(module: str) -> set[str]:
    """Return the names that a module defines at its top level, or imports from elsewhere than megalaunch."""
    names: set[str] = set()
    for node in _parse(module).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "megalaunch":
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


Definition = ast.FunctionDef | ast.ClassDef


def find_definition(place: str) -> Definition | None:
    """Return what is defined at "module:name"; None if its source does not say: it is compiled, imported or made there.

    Args:
        place: A method is named "module:Class.name".

    Raises:
        SourceError: There is no such module, or nothing in it has that name.
    """
    module, _, name = place.partition(":")
    if not name:
        raise SourceError(f"{place} is not of the form module:name")
    source = _find(module)
    if source is not None and source.suffix != ".py":
        return None
    tree: ast.Module | ast.ClassDef = _parse(module) if source is not None else ast.Module([], [])
    *outer, last = name.split(".")
    for part in outer:
        tree = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == part)
    bound = list(_bound_names(tree))
    if not {last, "*", "__getattr__"} & set(bound):
        raise SourceError(f"{module} has no {name}")
    found = [node for node in tree.body if isinstance(node, Definition) and node.name == last]
    return found[0] if len(found) == bound.count(last) == 1 else None


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that code gets anywhere in a source: more than those of its top level, never fewer."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node is not tree:
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.split(".")[0]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def find_misfit(implementation: str, original: str) -> tuple[str, str] | None:
    """Return why an implementation cannot stand for an original, and the fix; None: it can, or its source does not say.

    Values of defaults are not compared: different expressions may have equal values.

    Args:
        implementation: "module:name".
        original: Of megalaunch, as `find_definition` takes it.

    Raises:
        SourceError: As `find_definition`, for the implementation.
    """
    theirs, ours = find_definition(implementation), find_definition(original)
    if isinstance(ours, ast.ClassDef) and (
        isinstance(theirs, ast.FunctionDef) or (theirs is not None and not theirs.bases)
    ):
        return f"is not a subclass of {original.replace(':', '.')}", "derive it from that"
    their_arguments, our_arguments = _call_arguments(theirs), _call_arguments(ours)
    if their_arguments is None or our_arguments is None or _shape(their_arguments) == _shape(our_arguments):
        return None
    return (
        f"takes ({ast.unparse(their_arguments)}), not ({ast.unparse(our_arguments)})",
        "install its version for this megalaunch",
    )


def _call_arguments(definition: Definition | None) -> ast.arguments | None:
    """Return the arguments of a function or `__init__` without types; None if they are inherited or a decorator's."""
    if isinstance(definition, ast.ClassDef):
        inits = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        definition = inits[0] if len(inits) == 1 else None
    if definition is None or not all(_is_ours(decorator) for decorator in definition.decorator_list):
        return None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return definition.args


def _is_ours(decorator: ast.expr) -> bool:
    """Return whether a decorator is one of megalaunch's, which leave arguments as they are."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called).split(".")[-1] in ("override", "overridable")


def _shape(arguments: ast.arguments) -> str:
    """Return names, kinds and which have defaults, as text."""
    shown = copy.deepcopy(arguments)
    shown.defaults = [ast.Constant(None) for _ in shown.defaults]
    shown.kw_defaults = [default and ast.Constant(None) for default in shown.kw_defaults]
    return ast.unparse(shown)


def _parse(module: str) -> ast.Module:
    source = _find(module)
    if source is None or source.suffix != ".py":
        raise SourceError(f"{module} has no Python source to read; name its functions in a tuple of Override")
    try:
        return ast.parse(source.read_bytes(), str(source))
    except (OSError, SyntaxError, ValueError) as error:
        raise SourceError(f"{module} cannot be read: {error}") from error


def _exists(module: str) -> bool:
    try:
        _find(module)
    except SourceError:
        return False
    return True


def _find(module: str) -> Path | None:
    """Return the file of a module, None for a folder without one. `find_spec` would import the packages around it.

    Raises:
        SourceError: There is none.
    """
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None:
        raise SourceError(f"there is no module {module}")
    file = Path(spec.origin) if spec.origin is not None else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in rest:
        places = [place for folder in folders for place in (folder / part / "__init__.py", folder / f"{part}.py")]
        file = next((place for place in places if place.is_file()), None)
        packages = [folder / part for folder in folders if (folder / part).is_dir()]
        compiled = [path for folder in folders for path in folder.glob(f"{part}.*.so")]
        if file is None and not packages and not compiled:
            raise SourceError(f"there is no module {module}")
        file = file or next(iter(compiled), None)
        folders = packages if file is None or file.name == "__init__.py" else []
    return file
