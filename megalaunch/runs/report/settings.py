"""The settings of a run and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass

from megalaunch.plan.findings import as_override
from megalaunch.schema import RunSpec
from megalaunch.schema.build import leaves
from megalaunch.schema.paths import value_at


@dataclass(frozen=True)
class Setting:
    """A key of the spec. `origin`: `command line`, `recipe` (or another configuration file), or `default`."""

    key: str
    value: str
    origin: str


def list_settings(spec: RunSpec, overrides: Sequence[str]) -> list[Setting]:
    """Return every setting of a spec, in the order of the schema.

    `overrides`: those of the launch that wrote the spec. A value that is neither typed there nor the schema's default
    comes from the recipe, a group option or the resolution of `auto`.
    """
    typed = {override.partition("=")[0].lstrip("+~") for override in overrides if "=" in override}
    settings = []
    for path, _, entry in leaves(RunSpec):
        value = value_at(spec, path)
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        if path in typed:
            origin = "command line"
        else:
            origin = "default" if value == default else "recipe"
        settings.append(Setting(path, as_override(value), origin))
    return settings
