"""What another package may replace on a platform (`megalaunch/platform/overrides.py`): functions, methods and classes.

The device of a call's first tensor selects the implementation of a function or method, so that one process may use
several platforms. A class is selected where it is built, for the device that `build_for` names.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megalaunch.kernels.forms import prescribes_forms
from megalaunch.platform.overrides import OVERRIDABLE, Override, OverrideError, active_overrides, registered_count

Target = TypeVar("Target", bound=Callable[..., Any])

_built_for: ContextVar[str | None] = ContextVar("built_for", default=None)


def overridable(target: Target) -> Target:
    """Let packages replace a function or method that takes tensors, or a class, whose place a subclass takes."""
    assert target_name(target) in OVERRIDABLE, f"add {target_name(target)} to OVERRIDABLE"
    if isinstance(target, type):
        _select_when_built(target)
        return cast(Target, target)
    return cast(Target, _select_when_called(target))


def _select_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    target = target_name(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        override = None if prescribes_forms() else _find(target, _device(args, kwargs))
        return function(*args, **kwargs) if override is None else override(*args, **kwargs)

    return call


def _select_when_built(kind: type) -> None:
    """Let `kind(...)` build its override within `build_for`; subclasses are built as they are."""
    target = target_name(kind)

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        override = None
        if cls is kind and (device := _built_for.get()) is not None and not prescribes_forms():
            override = load_overrides(device).get(target)
        return object.__new__(cls if override is None else cast(type, override))

    new.__wrapped__ = kind.__init__  # type: ignore[attr-defined,misc]  # what inspect shows as the signature
    kind.__new__ = new  # type: ignore[method-assign,assignment]


@contextmanager
def build_for(device: torch.device) -> Iterator[None]:
    """Build the classes that packages replace on a device, also on meta, for a model that will be on it."""
    token = _built_for.set(device.type)
    try:
        yield
    finally:
        _built_for.reset(token)


def target_name(target: Callable[..., Any]) -> str:
    """Return the name of a function, method or class below megalaunch: "kernels.rms_norm.rms_norm"."""
    return f"{target.__module__}.{target.__qualname__}".removeprefix("megalaunch.")


def is_overridden(target: str, x: Tensor) -> bool:
    """Return whether the overridable function or method of this name, called with `x`, is another package's.

    It takes a name since torch.compile cannot trace `target_name`.
    """
    return not prescribes_forms() and _find(target, x.device.type) is not None


def _device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the device type of the first tensor among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"


def _find(target: str, device: str) -> Callable[..., Any] | None:
    if torch.compiler.is_compiling():  # it cannot trace imports; a worker imported them at its start
        return _loaded[device].get(target) if device in _loaded else None
    return load_overrides(device).get(target)


_loaded: dict[str, Mapping[str, Callable[..., Any]]] = {}
_registered_when_loaded: dict[str, int] = {}


def load_overrides(device: str) -> Mapping[str, Callable[..., Any]]:
    """Import the overrides of a device type, by target. Once a process, and again after `@override` registered more.

    Raises:
        OverrideError: One cannot be imported, or does not fit what it replaces.
    """
    if _registered_when_loaded.get(device) != registered_count() or device not in _loaded:
        _loaded[device] = {target: load_override(row) for target, row in active_overrides(device).items()}
        _registered_when_loaded[device] = registered_count()  # importing them registers those with @override
    return _loaded[device]


@contextmanager
def only_override(device: str, target: str) -> Iterator[Callable[..., Any] | None]:
    """Use no override on a device but that of one target, which the context gives (None: it has none)."""
    everything = load_overrides(device)
    _loaded[device] = {name: value for name, value in everything.items() if name == target}
    try:
        yield everything.get(target)
    finally:
        _loaded[device] = everything


def load_override(row: Override) -> Callable[..., Any]:
    """Import an override.

    Raises:
        OverrideError: It cannot be imported, or does not fit what it replaces.
    """
    where = f"{row}, which replaces {row.target} on {row.platform},"
    module, _, name = row.implementation.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise OverrideError(f"{where} cannot be imported: {reason}") from error
    original = reference(row.target)
    if isinstance(original, type) and not (isinstance(found, type) and issubclass(found, original)):
        raise OverrideError(f"{where} is not a subclass of megalaunch.{row.target}", "derive it from that")
    theirs, ours = (_parameters(each) for each in (found, original))
    if theirs != ours:
        raise OverrideError(
            f"{where} takes ({', '.join(theirs)}), not ({', '.join(ours)})", "install its version for this megalaunch"
        )
    return found


def reference(target: str) -> Callable[..., Any]:
    """Return the function, method or class itself, which no override replaces."""
    names = target.split(".")
    split = -2 if OVERRIDABLE[target] == "method" else -1
    found: Any = importlib.import_module(".".join(["megalaunch", *names[:split]]))
    for name in names[split:]:
        found = getattr(found, name)
    original: Callable[..., Any] = found if isinstance(found, type) else inspect.unwrap(found)
    return original


def _parameters(target: Callable[..., Any]) -> list[str]:
    """Return the parameters without their types: names, kinds and defaults."""
    found = inspect.signature(target.__init__ if isinstance(target, type) else target).parameters.values()  # type: ignore[misc]
    return [str(each.replace(annotation=inspect.Parameter.empty)) for each in found]
