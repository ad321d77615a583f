"""Megatron arguments of a command: each flag with its values, and the result of its conversion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from megalaunch.format.yaml_value import to_yaml
from megalaunch.importers.megatron.bash_expansion import is_unresolved
from megalaunch.importers.megatron.flag_table import DIRECT, EXPERTS, JOINT, LATENT, MANY
from megalaunch.importers.megatron.unsupported_flags import IGNORED, UNSUPPORTED

Status = Literal["mapped", "ignored", "unsupported", "unresolved", "unknown"]
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class Report:
    """Result of one flag's conversion: `text` is what it set, or the reason why it set nothing."""

    flag: str
    values: tuple[str, ...]
    status: Status
    text: str


@dataclass
class Arguments:
    """The flags of a command, by name without dashes.

    `statuses` records why a flag was not converted as given, `stray` the arguments that belong to no flag.
    """

    given: dict[str, tuple[str, ...]]
    statuses: dict[str, tuple[Status, str]] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return True if a flag was given and its value is known."""
        return name in self.given and not self._is_unresolved(name)

    def _is_unresolved(self, name: str) -> bool:
        status = self.statuses.get(name)
        return status is not None and status[0] == "unresolved"

    def value(self, name: str) -> str | None:
        """Return the single value of a flag; None if it was not given or its value is unknown."""
        values = self.given.get(name)
        return values[0] if values and self.has(name) else None

    def values(self, name: str) -> tuple[str, ...]:
        """Return all values of a flag."""
        return self.given.get(name, ()) if self.has(name) else ()

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer (`1e6` is accepted), or the default. Another value marks the flag as unsupported."""
        number = self.number(name)
        if number is None:
            return default
        if number != int(number):
            self.mark_unsupported(name, f"must be an integer, got {self.value(name)}")
            return default
        return int(number)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number, or the default. Another value marks the flag as unsupported."""
        text = self.value(name)
        if text is None:
            return default
        try:
            return float(text)
        except ValueError:
            self.mark_unsupported(name, f"must be a number, got {text!r}")
            return default

    def mark_unsupported(self, name: str, reason: str) -> None:
        """Record that a flag has an effect that the recipe cannot express."""
        if name in self.given:
            self.statuses.setdefault(name, ("unsupported", reason))

    def mark_ignored(self, name: str, reason: str) -> None:
        """Record that a flag has no effect on this run."""
        if name in self.given:
            self.statuses.setdefault(name, ("ignored", reason))


@cache
def known_flags() -> dict[str, int]:
    """Return every flag that sets a key, with the number of its values."""
    rows = {name: 0 if kind is bool else 1 for name, _, kind, _ in (*DIRECT, *EXPERTS, *LATENT)}
    return rows | {name: arity for name, (arity, _) in JOINT.items()}


@cache
def flag_keys(name: str) -> tuple[str, ...]:
    """Return the run spec keys that a flag affects."""
    direct = [key for flag, key, _, _ in (*DIRECT, *EXPERTS, *LATENT) if flag == name]
    return tuple(direct) or tuple(JOINT.get(name, (0, ""))[1].split())


@cache
def unmapped_reason(name: str) -> tuple[Status, str] | None:
    """Return why a flag sets nothing; None for an unknown flag."""
    rows: tuple[tuple[Status, dict[str, str]], ...] = (("unsupported", UNSUPPORTED), ("ignored", IGNORED))
    for exact in (True, False):
        for status, table in rows:
            for reason, names in table.items():
                for listed in names.split():
                    if listed == name or (not exact and listed.endswith("*") and fnmatchcase(name, listed)):
                        return status, reason
    return None


def is_flag(argument: str) -> bool:
    """Return True for a flag (`--num-layers`), False for a value, including a negative number."""
    return _FLAG.match(argument) is not None


def parse_arguments(command: Sequence[str]) -> Arguments:
    """Parse command-line arguments into flags and values. The last occurrence of a flag wins, as in Megatron."""
    given: dict[str, tuple[str, ...]] = {}
    stray: list[str] = []
    name: str | None = None
    for argument in command:
        if is_flag(argument):
            flag, equals, value = argument.partition("=")
            name = flag.lstrip("-").replace("_", "-")
            given.pop(name, None)
            given[name] = (value,) if equals else ()
        elif name is None or _is_full(name, given[name]):
            stray.append(argument)
        else:
            given[name] = (*given[name], argument)
    arguments = Arguments(given, stray=stray)
    for name, values in given.items():
        _classify(arguments, name, values)
    return arguments


def _is_full(name: str, values: tuple[str, ...]) -> bool:
    arity = known_flags().get(name, MANY)
    return arity != MANY and len(values) >= arity


def _classify(arguments: Arguments, name: str, values: tuple[str, ...]) -> None:
    """Record the status of a flag that is unknown, has an unresolved value, or lacks its value."""
    arity = known_flags().get(name)
    if arity is None:
        arguments.statuses[name] = unmapped_reason(name) or ("unknown", "")
    elif any(is_unresolved(value) for value in values):
        arguments.statuses[name] = ("unresolved", "its value depends on the running shell")
    elif (arity == 1 and not values) or (arity == MANY and not values):
        arguments.statuses[name] = ("unknown", "has no value")


def reports(arguments: Arguments, values: dict[str, Any]) -> Iterable[Report]:
    """Yield a report of each given flag, in order."""
    for name, given in arguments.given.items():
        sets = [f"{key} = {to_yaml(values[key])}" for key in flag_keys(name) if key in values]
        if name in arguments.statuses:
            status, text = arguments.statuses[name]
            yield Report(f"--{name}", given, status, text or f"unknown flag{_near(name)}")
        elif sets:
            yield Report(f"--{name}", given, "mapped", ", ".join(sets))
        else:
            yield Report(f"--{name}", given, "ignored", f"states the default ({' '.join(flag_keys(name))})")


def _near(name: str) -> str:
    import difflib

    listed = [flag for table in (IGNORED, UNSUPPORTED) for row in table.values() for flag in row.split()]
    exact = [flag for flag in listed if "*" not in flag]
    near = difflib.get_close_matches(name, [*known_flags(), *exact], n=1, cutoff=0.75)
    return f"; did you mean --{near[0]}?" if near else ""
