"""Megatron arguments of a command: each flag with its values, and the result of its conversion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from megalaunch.config.shown import to_yaml
from megalaunch.importers.megatron.bash_expansion import is_open
from megalaunch.importers.megatron.flag_table import DIRECT, EXPERTS, JOINT, LATENT, MANY
from megalaunch.importers.megatron.unsupported_flags import DROPPED, LOST

Fate = Literal["mapped", "dropped", "lost", "open", "unknown"]
_FLAG = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class Report:
    """Result of one flag's conversion: `text` is what it set, or the reason why it set nothing."""

    flag: str
    words: tuple[str, ...]
    fate: Fate
    text: str


@dataclass
class Arguments:
    """The flags of a command, by name without dashes. `fates` records why a flag was not converted as given."""

    given: dict[str, tuple[str, ...]]
    fates: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)

    def has(self, name: str) -> bool:
        """Return True if a flag was given and its value is known."""
        return name in self.given and not self._is_open(name)

    def _is_open(self, name: str) -> bool:
        fate = self.fates.get(name)
        return fate is not None and fate[0] == "open"

    def value(self, name: str) -> str | None:
        """Return the single value of a flag; None if it was not given or its value is unknown."""
        words = self.given.get(name)
        return words[0] if words and self.has(name) else None

    def values(self, name: str) -> tuple[str, ...]:
        """Return all values of a flag."""
        return self.given.get(name, ()) if self.has(name) else ()

    def integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer (`1e6` is accepted), or the default. Another value marks the flag as unsupported."""
        number = self.number(name)
        if number is None:
            return default
        if number != int(number):
            self.mark_unsupported(name, f"needs a whole number, got {self.value(name)}")
            return default
        return int(number)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a number, or the default. Another value marks the flag as unsupported."""
        word = self.value(name)
        if word is None:
            return default
        try:
            return float(word)
        except ValueError:
            self.mark_unsupported(name, f"needs a number, got {word!r}")
            return default

    def mark_unsupported(self, name: str, reason: str) -> None:
        """Record that a flag's meaning is lost in the conversion."""
        if name in self.given:
            self.fates.setdefault(name, ("lost", reason))

    def mark_ignored(self, name: str, reason: str) -> None:
        """Record that a flag has no effect on this run."""
        if name in self.given:
            self.fates.setdefault(name, ("dropped", reason))


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
def drop_reason(name: str) -> tuple[Fate, str] | None:
    """Return why a flag sets nothing; None for an unknown flag."""
    rows: tuple[tuple[Fate, dict[str, str]], ...] = (("lost", LOST), ("dropped", DROPPED))
    for exact in (True, False):
        for fate, table in rows:
            for reason, names in table.items():
                for listed in names.split():
                    if listed == name or (not exact and listed.endswith("*") and fnmatchcase(name, listed)):
                        return fate, reason
    return None


def is_flag(word: str) -> bool:
    """Return True for a flag (`--num-layers`), False for a value, including a negative number."""
    return _FLAG.match(word) is not None


def parse_arguments(words: Sequence[str]) -> Arguments:
    """Parse command-line words into flags and values. The last occurrence of a flag wins, as in Megatron."""
    given: dict[str, tuple[str, ...]] = {}
    stray: list[str] = []
    name: str | None = None
    for word in words:
        if is_flag(word):
            flag, equals, value = word.partition("=")
            name = flag.lstrip("-").replace("_", "-")
            given.pop(name, None)
            given[name] = (value,) if equals else ()
        elif name is None or _is_full(name, given[name]):
            stray.append(word)
        else:
            given[name] = (*given[name], word)
    arguments = Arguments(given, stray=stray)
    for name, values in given.items():
        _judge(arguments, name, values)
    return arguments


def _is_full(name: str, values: tuple[str, ...]) -> bool:
    arity = known_flags().get(name, MANY)
    return arity != MANY and len(values) >= arity


def _judge(arguments: Arguments, name: str, values: tuple[str, ...]) -> None:
    """Record a flag that is unknown, has no known value, or lacks its value."""
    arity = known_flags().get(name)
    if arity is None:
        arguments.fates[name] = drop_reason(name) or ("unknown", "")
    elif any(is_open(value) for value in values):
        arguments.fates[name] = ("open", "its value is known only when the script runs")
    elif (arity == 1 and not values) or (arity == MANY and not values):
        arguments.fates[name] = ("unknown", "has no value after it")


def reports(arguments: Arguments, values: dict[str, Any]) -> Iterable[Report]:
    """Yield a report of each given flag, in order."""
    for name, words in arguments.given.items():
        sets = [f"{key} = {to_yaml(values[key])}" for key in flag_keys(name) if key in values]
        if name in arguments.fates:
            fate, text = arguments.fates[name]
            yield Report(f"--{name}", words, fate, text or f"not known{_near(name)}")
        elif sets:
            yield Report(f"--{name}", words, "mapped", ", ".join(sets))
        else:
            yield Report(f"--{name}", words, "dropped", f"says what is so anyway ({' '.join(flag_keys(name))})")


def _near(name: str) -> str:
    import difflib

    plain = [word for table in (DROPPED, LOST) for row in table.values() for word in row.split() if "*" not in word]
    near = difflib.get_close_matches(name, [*known_flags(), *plain], n=1, cutoff=0.75)
    return f"; did you mean --{near[0]}?" if near else ""
