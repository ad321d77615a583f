"""Operators that another package may replace on the tensors of a platform (`megalaunch/platform/overrides.py`).

The device of an operator's first tensor selects the implementation, so that one process may use several platforms.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from megalaunch.kernels.overrides import simulates
from megalaunch.platform.overrides import OVERRIDABLE, Override, OverrideError, active_overrides

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def overridable(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let packages replace a function whose first argument is a tensor."""
    target = operator_name(function)
    assert target in OVERRIDABLE, f"add {target} to OVERRIDABLE"

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        override = None if simulates() else _find(target, args[0])
        return function(*args, **kwargs) if override is None else override(*args, **kwargs)

    return call


def operator_name(function: Callable[..., Any]) -> str:
    """Return an operator's name below megalaunch: "kernels.rms_norm.rms_norm"."""
    return f"{function.__module__}.{function.__qualname__}".removeprefix("megalaunch.")


def _find(target: str, first: Any) -> Callable[..., Any] | None:
    device = first.device.type
    if torch.compiler.is_compiling():  # it cannot trace imports; a worker imported them at its start
        return _loaded[device].get(target) if device in _loaded else None
    return load_overrides(device).get(target)


_loaded: dict[str, Mapping[str, Callable[..., Any]]] = {}


def load_overrides(device: str) -> Mapping[str, Callable[..., Any]]:
    """Import the overrides of a device type, by operator. Once a process.

    Raises:
        OverrideError: One cannot be imported, or has other parameters than the operator that it replaces.
    """
    if device not in _loaded:
        _loaded[device] = {target: _load(row) for target, row in active_overrides(device).items()}
    return _loaded[device]


def _load(row: Override) -> Callable[..., Any]:
    where = f"{row.implementation}, which replaces {row.target} on {row.platform},"
    module, _, name = row.implementation.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise OverrideError(f"{where} cannot be imported: {reason}; repair or uninstall its package") from error
    theirs, ours = (_parameters(each) for each in (function, reference(row.target)))
    if theirs != ours:
        raise OverrideError(
            f"{where} takes ({', '.join(theirs)}), not ({', '.join(ours)}); install its version for this megalaunch"
        )
    return function


def reference(target: str) -> Callable[..., Any]:
    """Return the operator itself, which no override replaces."""
    module, _, name = target.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(f"megalaunch.{module}"), name)
    return inspect.unwrap(function)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameters without their types: names, kinds and defaults."""
    found = inspect.signature(function).parameters.values()
    return [str(each.replace(annotation=inspect.Parameter.empty)) for each in found]
