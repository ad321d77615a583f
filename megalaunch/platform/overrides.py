"""What other packages replace on a platform, found by the entry point `megalaunch.overrides`. Without torch.

An entry point names a tuple of `Override` and `OverridePackage`, or a module whose functions and classes carry
`@override`. Implementations are imported where a worker first uses the platform; here their sources are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from megalaunch.platform.plugin_sources import SourceError, decorated_names, find_misfit, mirrored_names
from megalaunch.platform.plugins import PlatformError, all_platforms

GROUP = "megalaunch.overrides"
Target = TypeVar("Target", bound=Callable[..., Any])

OVERRIDABLE: Mapping[str, Literal["function", "method", "class"]] = MappingProxyType(
    {
        "kernels.add_norm.add_norm": "function",
        "kernels.causal_attention.causal_sdpa": "function",
        "kernels.causal_attention.masked_sdpa": "function",
        "kernels.cross_entropy.cross_entropy": "function",
        "kernels.grouped_linear.grouped_linear": "function",
        "kernels.rms_norm.rms_norm": "function",
        "kernels.swiglu.swiglu": "function",
        "engine.model.rope.apply_rope": "function",
        "engine.model.moe.routing.score_experts": "function",
        "engine.model.moe.routing.top_k_stable": "function",
        "engine.optimizer.muon.orthogonalize": "function",
        "engine.model.layers.Norm.normalize": "method",
        "engine.model.attention.attention.SelfAttention.core_attention": "method",
        "engine.model.mlp.MLP.activation": "method",
        "engine.model.moe.experts.Experts.activation": "method",
        "engine.model.layers.Norm": "class",
        "engine.model.attention.attention.Attention": "class",
        "engine.model.attention.latent_attention.LatentAttention": "class",
        "engine.model.mlp.MLP": "class",
        "engine.model.moe.router.Router": "class",
        "engine.model.moe.experts.Experts": "class",
        "engine.optimizer.update_rules.AdamW": "class",
    }
)
"""What carries `@overridable` (kernels/overridable.py): names below megalaunch."""


class OverrideError(PlatformError):
    """An override cannot be loaded, replaces nothing, is for no platform, or contradicts another one."""


@dataclass(frozen=True)
class Override:
    """A function or class of another package that replaces one of ours on a platform.

    Attributes:
        target: one of `OVERRIDABLE`.
        implementation: "module:name". A function has the parameters of the target; a class is a subclass of it.
        platform: the device type on whose tensors it is called, or for which a model with it is built.
        priority: of several for one target, the highest is used.
        vendor: the distribution that installs it, with its version; "" for one that this process registered.
    """

    target: str
    implementation: str
    platform: str
    priority: int = 0
    vendor: str = ""

    def __str__(self) -> str:
        return self.implementation + (f" ({self.vendor})" if self.vendor else "")


@dataclass(frozen=True)
class OverridePackage:
    """A package that mirrors megalaunch: its `kernels.rms_norm.rms_norm` replaces ours.

    Attributes:
        package: its dotted name; `PACKAGE.engine.model.layers` mirrors `megalaunch.engine.model.layers`.
        platform: as of `Override`, for all that it replaces.
        priority: as of `Override`.
    """

    package: str
    platform: str
    priority: int = 0


_registered: list[Override] = []


def override(target: str, *, platform: str, priority: int = 0) -> Callable[[Target], Target]:
    """Replace a function, method or class of megalaunch by the decorated one.

    In a module that an entry point `megalaunch.overrides` names, arguments are literals: they are read without
    importing it. In any other module, the override holds from its import on, in this process.

    Args:
        target: One of `OVERRIDABLE`.
        platform: The device type.
        priority: Of several for one target, the highest is used.

    Raises:
        OverrideError: Nothing has that name, there is no such platform, or the decorated is inside another.
    """

    def register(implementation: Target) -> Target:
        name = implementation.__qualname__
        where = f"{implementation.__module__}:{name}"
        if "." in name:
            raise OverrideError(f"{where}, which replaces {target}, is not at the top of its module", "move it there")
        row = Override(target, where, platform, priority)
        _check(row, where)
        if row not in _registered:
            _registered.append(row)
        return implementation

    return register


def registered_count() -> int:
    """Return how many overrides `@override` registered in this process so far."""
    return len(_registered)


@cache
def installed_overrides() -> tuple[Override, ...]:
    """Return the overrides of all installed packages.

    Raises:
        OverrideError: An entry point cannot be loaded or replaces nothing, or an override names no target or platform.
    """
    found: list[Override] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        vendor = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        where = f"the overrides {entry.name} of {entry.dist.name if entry.dist is not None else entry.value}"
        try:
            rows = list(_rows(entry, where))
        except SourceError as error:
            raise OverrideError(f"{where}: {error}") from error
        for row in rows:
            _check(row, where)
        found += [replace(row, vendor=vendor) for row in rows]
    return tuple(found)


def _rows(entry: EntryPoint, where: str) -> Iterator[Override]:
    """Yield the overrides of an entry point."""
    if not entry.attr:
        for name, arguments in decorated_names(entry.module):
            yield Override(implementation=f"{entry.module}:{name}", **arguments)
        return
    try:
        rows = entry.load()
    except Exception as error:
        raise OverrideError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(rows, tuple) or not all(isinstance(row, (Override, OverridePackage)) for row in rows):
        raise OverrideError(f"{where} are {rows!r}, not a tuple of Override and OverridePackage")
    for row in rows:
        if isinstance(row, Override):
            yield row
        else:
            targets = [target for target, kind in OVERRIDABLE.items() if kind != "method"]
            for target, implementation in mirrored_names(row.package, targets):
                yield Override(target, implementation, row.platform, row.priority)


def _check(row: Override, where: str) -> None:
    """Raise OverrideError for an override of nothing, or for no platform."""
    if row.target not in OVERRIDABLE:
        raise OverrideError(f"{where} replace {row.target}", f"what can be replaced: {', '.join(OVERRIDABLE)}")
    if row.platform not in all_platforms():
        raise OverrideError(f"{where} are for {row.platform}", f"platforms are {', '.join(all_platforms())}")


def active_overrides(device: str) -> Mapping[str, Override]:
    """Return the override of each replaced target on a device type.

    Raises:
        OverrideError: As `installed_overrides`, or two of one priority replace the same target, or the source of one
            shows that it cannot be imported or does not fit. What only an import shows, a worker reports.
    """
    chosen: dict[str, Override] = {}
    installed = installed_overrides()
    known = {replace(row, vendor="") for row in installed}
    here = [row for row in (*installed, *_registered) if row.platform == device and (row.vendor or row not in known)]
    for row in sorted(here, key=lambda row: row.priority):
        other = chosen.get(row.target)
        if other is not None and other.priority == row.priority:
            raise OverrideError(
                f"{other} and {row} both replace {row.target} on {device} with priority {row.priority}",
                "uninstall one package, or change its priority",
            )
        chosen[row.target] = row
    for row in chosen.values():
        if row.vendor:
            _check_source(row)
    return chosen


@cache
def _check_source(row: Override) -> None:
    """Raise OverrideError for an implementation whose source shows that it cannot be used."""
    where = f"{row}, which replaces {row.target} on {row.platform},"
    try:
        misfit = find_misfit(row.implementation, place_of(row.target))
    except SourceError as error:
        raise OverrideError(f"{where} cannot be imported: {error}") from error
    if misfit is not None:
        raise OverrideError(f"{where} {misfit[0]}", misfit[1])


def place_of(target: str) -> str:
    """Return a target as "module:name", or "module:Class.name"."""
    names = target.split(".")
    split = -2 if OVERRIDABLE[target] == "method" else -1
    return f"megalaunch.{'.'.join(names[:split])}:{'.'.join(names[split:])}"
