"""Find the platform of a device."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import torch

from megalaunch.engine.platform.platform import Platform
from megalaunch.platform.platforms import PlatformFacts
from megalaunch.platform.plugins import PlatformError, all_platforms, find_platform


def platform_of(device: torch.device) -> Platform:
    """Return the platform of a device."""
    return get_platform(device.type)


@cache
def get_platform(device_type: str) -> Platform:
    """Return the platform of a device type. One instance a process.

    Raises:
        ValueError: No platform has this device type.
        PlatformError: Its class cannot be imported, or is no Platform.
    """
    facts = find_platform(device_type)
    if facts is None:
        raise ValueError(f"no platform has torch's device type {device_type}; known are {', '.join(all_platforms())}")
    return _load(facts)


def _load(facts: PlatformFacts) -> Platform:
    module, _, name = facts.implementation.partition(":")
    where = f"the platform {facts.device}: {facts.implementation}"
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlatformError(f"{where} cannot be imported: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, Platform)):
        raise PlatformError(f"{where} is not a subclass of {Platform.__module__}.Platform", "derive it from that")
    return found(facts)


def best_device() -> torch.device:
    """Return the device of a program that was not told one: of the preferred platform that can be used, else the CPU.

    A platform that needs a package of its own takes part if that package is installed.
    """
    for facts in all_platforms().values():
        platform = get_platform(facts.device)
        if facts.package is not None and find_spec(facts.package) is None:
            continue
        if platform.unusable() is None:
            return platform.device(0)
    raise AssertionError("the CPU is always usable")
