"""Platforms and chips of other packages, found by the entry point `megalaunch.platforms`.

Such a package needs no torch for its facts: its entry point names a `PlatformPlugin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.platforms import PLATFORMS, PlatformFacts
from megalaunch.platform.plugin_sources import SourceError, find_definition

GROUP = "megalaunch.platforms"


class PlatformError(Exception):
    """A platform of another package cannot be loaded, or contradicts another one.

    Attributes:
        cause: what is wrong, with the package.
        fix: what its user can do.
    """

    def __init__(self, cause: str, fix: str = "repair or uninstall that package") -> None:
        super().__init__(f"{cause}; {fix}")
        self.cause, self.fix = cause, fix


@dataclass(frozen=True)
class PlatformPlugin:
    """What a package adds: a platform, and the chips of which plans and runs may be made."""

    facts: PlatformFacts
    chips: tuple[ChipFacts, ...] = ()


@cache
def plugins() -> tuple[PlatformPlugin, ...]:
    """Load the plug-ins of all installed packages, by name.

    Raises:
        PlatformError: An entry point cannot be loaded, or is no PlatformPlugin, or names a device type twice, a chip of
            another one, or a class that its package does not have.
    """
    found: dict[str, str] = dict.fromkeys(PLATFORMS, "megalaunch")
    loaded = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist is not None else entry.value
        try:
            plugin = entry.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise PlatformError(f"the platform {entry.name} of {package} cannot be loaded: {reason}") from error
        if not isinstance(plugin, PlatformPlugin):
            raise PlatformError(f"the platform {entry.name} of {package} is {plugin!r}, not a PlatformPlugin")
        device = plugin.facts.device
        if device in found:
            raise PlatformError(f"{package} and {found[device]} both add the device type {device}", "uninstall one")
        _check_facts(plugin, f"the platform {entry.name} of {package}")
        found[device] = package
        loaded.append(plugin)
    return tuple(loaded)


def _check_facts(plugin: PlatformPlugin, where: str) -> None:
    """Raise PlatformError for a chip of another platform, or a class that does not exist."""
    for chip in plugin.chips:
        if chip.device != plugin.facts.device:
            device = plugin.facts.device
            raise PlatformError(f"{where} has the device type {device}, but its chip {chip.name} has {chip.device}")
    try:
        find_definition(plugin.facts.implementation)
    except SourceError as error:
        raise PlatformError(f"{where} names the class {plugin.facts.implementation}, but {error}") from error


def all_platforms() -> Mapping[str, PlatformFacts]:
    """Return all platforms by device type, the one that automatic selection prefers first."""
    rows = [*PLATFORMS.values(), *(plugin.facts for plugin in plugins())]
    return {facts.device: facts for facts in sorted(rows, key=lambda facts: -facts.priority)}


def find_platform(device: str) -> PlatformFacts | None:
    """Return the platform of a device type, or None. Looks at other packages only for a type that is not ours."""
    return PLATFORMS.get(device) or all_platforms().get(device)
