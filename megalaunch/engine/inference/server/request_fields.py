"""The fields of a request's JSON: read with their types and limits, each refused by its name."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any

from megalaunch.data.preprocess.records import find_lone_surrogate
from megalaunch.engine.inference.server.api_error import ApiError

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_CHOICES = 128


def refuse_half_characters(data: Any) -> None:
    """Refuse a request with half of a surrogate pair in a name or a value: no tokenizer, and no answer, can hold it.

    JSON can: clients whose strings are UTF-16, as JavaScript's, send it after a cut in the middle of an emoji.

    Raises:
        ApiError: It names the field.
    """
    fix = "do not cut a string inside a surrogate pair"
    for name, value in data.items() if isinstance(data, dict) else ():
        if (half := find_lone_surrogate(name)) is not None:
            raise ApiError(f"a field's name holds half a character ({half}): {fix}")
        # one string of the value: a walk in Python over a million token ids would hold up other requests
        if (half := find_lone_surrogate(json.dumps(value, ensure_ascii=False))) is not None:
            raise ApiError(f"holds half a character ({half}): {fix}", name)


class RequestFields:
    """Reads the fields of one request. Null stands for the default, as in OpenAI's interface.

    Args:
        data: The JSON of the request.
        known: The fields that are read.
        ignored: Fields that change nothing here, such as `user`.

    Raises:
        ApiError: The JSON is no object, or has a field that is neither known nor ignored.
    """

    def __init__(self, data: Any, known: frozenset[str], ignored: frozenset[str]) -> None:
        if not isinstance(data, dict):
            raise ApiError("the body must be a JSON object")
        for name, value in data.items():
            if name not in known | ignored and value is not None:
                near = difflib.get_close_matches(name, known, n=1)
                raise ApiError(f"unknown field{f'; did you mean {near[0]}?' if near else ''}", name)
        self._data: Mapping[str, Any] = data

    def get(self, name: str) -> Any:
        """Return a field as it is; None if it is missing."""
        return self._data.get(name)

    def boolean(self, name: str) -> bool:
        """Return true or false, by default false."""
        value = self.get(name)
        if value not in (None, True, False):
            raise ApiError("must be true or false", name)
        return bool(value)

    def text(self, name: str) -> str | None:
        """Return a string; None if it is missing."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise ApiError("must be a string", name)
        return value

    def integer(self, name: str, lowest: int, highest: int | None = None) -> int | None:
        """Return an integer from `lowest` to `highest`; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not _is_integer(value) or value < lowest or (highest is not None and value > highest):
            limits = f"from {lowest} to {highest}" if highest is not None else f"of at least {lowest}"
            raise ApiError(f"must be an integer {limits}, not {value!r}", name)
        return int(value)

    def number(self, name: str, default: float, lowest: float, highest: float = math.inf) -> float:
        """Return a number from `lowest` to `highest`."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            limits = f"from {lowest:g} to {highest:g}" if highest < math.inf else f"of at least {lowest:g}"
            raise ApiError(f"must be a number {limits}, not {value!r}", name)
        return float(value)

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        value = self.get("stop")
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
            raise ApiError("must be a string or a list of strings", "stop")
        if "" in stops:
            raise ApiError("a stop string is empty: every text would end at once", "stop")
        if len(stops) > MAX_STOPS:
            raise ApiError(f"has {len(stops)} strings; at most {MAX_STOPS} are taken", "stop")
        return tuple(stops)

    def logit_bias(self, vocab_size: int) -> dict[int, float]:
        """Return the bias of each token id."""
        value = self.get("logit_bias") or {}
        if not isinstance(value, dict):
            raise ApiError("must be an object of token ids and numbers", "logit_bias")
        biases = {}
        for token, bias in value.items():
            if not token.isascii() or not token.isdigit() or int(token) >= vocab_size:
                raise ApiError(f"{token!r} is no token id; there are {vocab_size:,}", "logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ApiError(f"the bias of token {token} must be a number from -100 to 100", "logit_bias")
            biases[int(token)] = float(bias)
        return biases

    def refuse(self, name: str, allowed: tuple[Any, ...], reason: str) -> None:
        """Refuse a field whose value is set, and not among those that change nothing."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise ApiError(reason, name)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
