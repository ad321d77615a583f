"""Read values in Hydra's override grammar: one value, or the values of a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from megalaunch.config.search_space import Categorical, Range

MOST_VALUES = 1_000_000
"""Of a range: Hydra makes a text of each, so that more would take minutes."""


class GrammarError(ValueError):
    """The override is not in Hydra's grammar; the message has Hydra's reason."""


class SeveralValues(ValueError):
    """The override is that of a sweep."""


def read_value(key: str, raw: str) -> Any:
    """Return the value of `key=raw`: a number, text, true, false, None, a list or a dict.

    Raises:
        GrammarError: it cannot be parsed.
        SeveralValues: it has several values, for a sweep.
    """
    parsed = _parse(key, raw)
    if parsed.is_sweep_override():
        raise SeveralValues(raw)
    return parsed.value()


def quoted(text: str) -> str:
    """Return text as a quoted string of the grammar: any character stands for itself, `${...}` is interpolated."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def read_text(text: str) -> str:
    """Return what a value of a sweep stands for where free text is taken as typed: without quotes and escapes."""
    value = read_value("text", text)
    return value if isinstance(value, str) else text


def read_sweep(key: str, raw: str, names: Callable[[], list[str]]) -> Categorical | Range | None:
    """Return the values of `key=raw` with choice, range, interval, glob or commas; None for a single value.

    `names` gives the options that a glob selects from. Raises GrammarError with Hydra's reason.
    """
    parsed = _parse(key, raw)
    if not parsed.is_sweep_override():
        return None
    sweep: Any = parsed.value()
    if isinstance(sweep, IntervalSweep):
        low, high = (0.0 if end is None else end for end in (sweep.start, sweep.end))
        return Range(low, high, "log" in sweep.tags, isinstance(low, int) and isinstance(high, int))
    if isinstance(sweep, Glob):
        return Categorical(tuple(sorted(sweep.filter(names()))))
    if getattr(sweep, "shuffle", False):
        raise GrammarError("shuffle has a new order in each run; use --sampler random, whose order is reproducible")
    if isinstance(sweep, RangeSweep) and abs((sweep.stop or 0) - (sweep.start or 0)) > MOST_VALUES * abs(sweep.step):
        raise GrammarError(f"{raw} has more than {MOST_VALUES:,} values; use interval(a,b) with --sampler random")
    return Categorical(tuple(dict.fromkeys(parsed.sweep_string_iterator())))


def _parse(key: str, raw: str) -> Override:
    try:
        return OverridesParser.create().parse_override(f"{key}={raw}")
    except HydraException as error:
        raise GrammarError(f"cannot read {raw!r}: {str(error).splitlines()[0]}") from error
