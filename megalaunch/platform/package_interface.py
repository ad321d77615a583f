"""Compare the interface of an installed package with what is called of it: which names and arguments it lacks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any


def missing_names(modules: Mapping[str, Any], bound: Mapping[str, Collection[str]]) -> list[str]:
    """Return which of the bound names and arguments modules lack, as "module.name" and "module.name(argument=)".

    What takes any keyword, which it gives to a base class, lacks none.

    Args:
        modules: Imported modules, by the names that start the paths of `bound`.
        bound: What is called, as "module.name" or "module.Class.method", with the arguments that it is given by name.
    """
    found = []
    for path, arguments in bound.items():
        module = next(name for name in modules if path.startswith(f"{name}."))
        names = path.removeprefix(f"{module}.").split(".")
        called = reduce(lambda owner, name: getattr(owner, name, None), names, modules[module])
        if called is None:
            found.append(path)
        elif arguments:
            accepted = inspect.signature(called).parameters
            if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
                found += [f"{path}({argument}=)" for argument in arguments if argument not in accepted]
    return found
