"""Read a Hugging Face config.json: every key that changes the model's output is read, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalaunch.importers.huggingface.ignored_keys import METADATA, ignore_reason

_MISSING = object()


class ConfigFile:
    """The keys of one file, with the problems that prevent an exact conversion and notes on ignored keys."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data
        self._taken: set[str] = set()
        self.problems: list[str] = []
        self.notes: list[str] = []

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Return the value of a key (None for null). A missing key gives `default`; without one it is a problem."""
        self._taken.add(key)
        if key in self._data:
            return self._data[key]
        if default is _MISSING:
            self.problems.append(f"config.json has no {key}")
            return None
        return default

    def number(self, key: str, default: Any = _MISSING, null: Any = _MISSING) -> Any:
        """Return a positive number.

        Args:
            key: the key.
            default: value for a missing key; without one it is a problem.
            null: value for null; without one it is a problem.
        """
        value = self.pop(key, default)
        if value is None and key in self._data:
            if null is _MISSING:
                self.problems.append(f"config.json: {key} is null, must be a number above 0")
                return None
            return null
        wrong = value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0)
        if wrong:
            self.problems.append(f"config.json: {key} is {value!r}, must be a number above 0")
        return None if wrong else value

    def integer(self, key: str, default: Any = _MISSING, null: Any = _MISSING) -> Any:
        """Return a positive integer; arguments as for `number`."""
        value = self.number(key, default, null)
        if isinstance(value, float):
            self.problems.append(f"config.json: {key} is {value!r}, must be an integer")
            return None
        return value

    def rate(self, key: str, default: float) -> float:
        """Return a dropout rate from 0 to 1; null is 0."""
        value = self.pop(key, default)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            self.problems.append(f"config.json: {key} is {value!r}, must be a number from 0 to 1")
            return 0.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; any other value is a problem."""
        value = self.pop(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"config.json: {key} is {value!r}, must be true or false")
        return value is True

    def pop_choice(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """Return the value of `choices` for a key's string; any other string is a problem."""
        name = self.pop(key, default)
        if not isinstance(name, str) or name not in choices:
            self.problems.append(f"config.json: {key} is {name!r}, must be one of {', '.join(choices)}")
            return None
        return choices[name]

    def expect(self, key: str, value: Any) -> None:
        """Require a key to be missing or to have one value; other values are not supported."""
        found = self.pop(key, value)
        if found != value:
            self.problems.append(f"config.json: {key} is {found!r}; only {value!r} is supported")

    def ignore(self, key: str, why: str) -> None:
        """Ignore a key that transformers does not read for this family, and note it if it is set."""
        if self.pop(key, None) is not None:
            self.notes.append(f"config.json: {key} ({self._data[key]!r:.80}) is ignored: {why}")

    def accept_quantization(self, method: str) -> None:
        """Accept weights that are quantised by one method: they are dequantised when they are read."""
        quantized = self._data.get("quantization_config")
        if isinstance(quantized, Mapping) and quantized.get("quant_method") == method:
            self.ignore("quantization_config", "the weights are dequantised to bf16 when they are read")

    def reject_unknown_keys(self) -> None:
        """Make a problem of every unread key that may change the model's output; others give a note or nothing."""
        for key, value in self._data.items():
            if key == "quantization_config" and isinstance(value, Mapping) and key not in self._taken:
                method, bits = value.get("quant_method", "unnamed method"), value.get("bits")
                self.problems.append(
                    f"config.json: the weights are quantised ({method}{f', {bits} bits' if bits else ''}); take the "
                    "unquantised model"
                )
                continue
            if key in self._taken or key in METADATA or value is None:
                continue
            why = ignore_reason(key, value)
            if why is None:
                self.problems.append(
                    f"config.json: {key} ({value!r:.80}) is unknown to this family; remove it if the logits do not "
                    "depend on it"
                )
            else:
                self.notes.append(f"config.json: {key} ({value!r:.80}) is ignored: {why}")


def every_nth(selected: list[bool], feature: str, problems: list[str]) -> int | None:
    """Return n if exactly the layers n - 1, 2n - 1, ... are selected, None if none is. Another pattern is a problem."""
    if not any(selected):
        return None
    every = selected.index(True) + 1
    if selected != [(index + 1) % every == 0 for index in range(len(selected))]:
        pattern = "".join("x" if layer else "." for layer in selected)
        problems.append(f"config.json: {feature} is not supported in these layers, only in every n-th: {pattern}")
    return every
