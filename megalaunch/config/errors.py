"""The one exception of composition: every problem of the words and files at once."""

from __future__ import annotations

from megalaunch.config.schema import SpecError, SpecProblem

__all__ = ["ConfigError", "SpecProblem"]


class ConfigError(SpecError):
    """The words and files do not compose to a run spec; `problems` lists every reason."""
