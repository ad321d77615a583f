"""Parse the overrides of a sweep: those with several values become axes, the others apply to every point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalaunch.config.compose import read_axis
from megalaunch.config.errors import COMMAND_LINE, ConfigError
from megalaunch.config.keys import GROUPS, schema_keys
from megalaunch.config.search_space import Categorical, Range, Values
from megalaunch.schema import SpecProblem

_SET_BY_SWEEP = ("run.directory", "run.name")


@dataclass(frozen=True)
class SweepOverrides:
    """The overrides as typed, and the axes among them by key, in the order typed."""

    typed: tuple[str, ...]
    axes: Mapping[str, Categorical | Range]

    def point(self, values: Values) -> tuple[str, ...]:
        """Return the overrides of one run, with the value of each axis at its position."""
        keys = [override.partition("=")[0] for override in self.typed]
        return tuple(
            f"{key}={values[key]}" if key in values else override
            for key, override in zip(keys, self.typed, strict=True)
        )

    @property
    def size(self) -> int | None:
        """Number of points of the full grid; None when an axis is an interval."""
        size = 1
        for axis in self.axes.values():
            if isinstance(axis, Range):
                return None
            size *= len(axis.values)
        return size


def parse_sweep(overrides: Sequence[str]) -> SweepOverrides:
    """Find the axes; raises ConfigError with every override that cannot be parsed, or if none lists several values."""
    problems: list[SpecProblem] = []
    axes: dict[str, Categorical | Range] = {}
    keys = [override.partition("=")[0] for override in overrides]
    for override, key in zip(overrides, keys, strict=True):
        _, equals, raw = override.partition("=")
        if key in _SET_BY_SWEEP:
            problems.append(_problem(key, "is set by the sweep for each trial; name the sweep with --name"))
        if not equals or (key not in (*GROUPS, "recipe") and key not in schema_keys()):
            continue  # composition reports it
        try:
            axis = read_axis(key, raw)
        except ValueError as error:
            problems.append(_problem(key, str(error)))
            continue
        if axis is not None:
            axes[key] = axis
            problems += _axis_problems(key, axis, keys.count(key))
    if not axes and not problems:
        message = "no override has several values, e.g. 'optimizer.lr=1e-4,3e-4' or 'parallel=tp1,tp2'"
        problems.append(_problem("sweep", f"{message}; start a single run with `megalaunch train`"))
        if not overrides:
            example = "for example, here: megalaunch sweep recipe=quickstart optimizer.lr=1e-3,3e-4 train.steps=20"
            problems.append(_problem("recipe", f"no recipe is given; {example}"))
    if problems:
        raise ConfigError(problems)
    return SweepOverrides(tuple(overrides), axes)


def _axis_problems(key: str, axis: Categorical | Range, given: int) -> list[SpecProblem]:
    if given > 1:
        return [_problem(key, "has several values and is given twice; remove one")]
    if isinstance(axis, Categorical):
        return [] if axis.values else [_problem(key, "matches no option")]
    if key not in schema_keys():
        return [_problem(key, "takes the name of an option, not an interval of numbers")]
    if axis.low >= axis.high:
        return [_problem(key, f"the interval from {axis.low} to {axis.high} is empty")]
    if axis.log and axis.low <= 0:
        return [_problem(key, f"a logarithmic interval must start above 0, got {axis.low}")]
    return []


def _problem(key: str, message: str) -> SpecProblem:
    return SpecProblem(key, message, COMMAND_LINE)
