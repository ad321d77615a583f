"""Operators that other packages replace on a platform, found by the entry point `megalaunch.overrides`. Without torch.

Such an entry point names a tuple of `Override`; implementations are imported where a worker first uses the platform.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from megalaunch.platform.plugins import PlatformError, all_platforms

GROUP = "megalaunch.overrides"

OVERRIDABLE = (
    "kernels.causal_attention.causal_sdpa",
    "kernels.cross_entropy.cross_entropy",
    "kernels.rms_norm.rms_norm",
    "kernels.swiglu.swiglu",
)
"""The functions that carry `@overridable` (kernels/overridable.py), by their names below megalaunch."""


class OverrideError(PlatformError):
    """An override cannot be loaded, names no operator or platform, or contradicts another one."""


@dataclass(frozen=True)
class Override:
    """A function of another package that replaces an operator on a platform.

    Attributes:
        target: one of `OVERRIDABLE`.
        implementation: the function, as "module:function", with the parameters of the target.
        platform: the device type on whose tensors it is called.
        priority: of several for one target, the highest is used.
    """

    target: str
    implementation: str
    platform: str
    priority: int = 0


@cache
def installed_overrides() -> tuple[Override, ...]:
    """Return the overrides of all installed packages.

    Raises:
        OverrideError: An entry point cannot be loaded, or an override names no operator or no platform.
    """
    found: list[Override] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        where = f"the overrides {entry.name} of {entry.dist.name if entry.dist is not None else entry.value}"
        try:
            rows = entry.load()
        except Exception as error:
            raise OverrideError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
        if not isinstance(rows, tuple) or not all(isinstance(row, Override) for row in rows):
            raise OverrideError(f"{where} are {rows!r}, not a tuple of Override")
        for row in rows:
            if row.target not in OVERRIDABLE:
                raise OverrideError(f"{where} replace {row.target}; operators are {', '.join(OVERRIDABLE)}")
            if row.platform not in all_platforms():
                raise OverrideError(f"{where} are for {row.platform}; platforms are {', '.join(all_platforms())}")
        found += rows
    return tuple(found)


def active_overrides(device: str) -> Mapping[str, Override]:
    """Return the override of each replaced operator on a device type.

    Raises:
        OverrideError: As `installed_overrides`, or two of one priority replace the same operator.
    """
    chosen: dict[str, Override] = {}
    here = [row for row in installed_overrides() if row.platform == device]
    for row in sorted(here, key=lambda row: row.priority):
        other = chosen.get(row.target)
        if other is not None and other.priority == row.priority:
            raise OverrideError(
                f"{other.implementation} and {row.implementation} both replace {row.target} on {device} with priority "
                f"{row.priority}; uninstall one package, or change its priority"
            )
        chosen[row.target] = row
    return chosen
