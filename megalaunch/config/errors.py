"""The exception of composition: it has every problem of the overrides and files at once."""

from __future__ import annotations

from megalaunch.schema import SpecError, SpecProblem

__all__ = ["COMMAND_LINE", "ConfigError", "SpecProblem"]

COMMAND_LINE = "command line"
"""Where a typed override comes from."""


class ConfigError(SpecError):
    """The overrides and files do not compose to a run spec; `problems` lists every reason."""
