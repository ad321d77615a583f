"""The values of a sweep's axis: a list, or an interval to sample from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

Values = Mapping[str, str]
"""One point of a sweep: the value of each axis, as the right side of an override."""


@dataclass(frozen=True)
class Categorical:
    """Values as typed (`1e-4`, `tp2`), in that order."""

    values: tuple[str, ...]

    def draw(self, random: Random) -> str:
        """Return a random value."""
        return random.choice(self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, log-uniform if `log`; `integer`: integers, both ends included."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def draw(self, random: Random) -> str:
        """Return a random number as an override value, with four significant digits: no sweep resolves more."""
        if self.log:
            number = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = random.uniform(self.low, self.high)
        return self.override(number)

    def override(self, number: float) -> str:
        """Return a number of the interval as an override value."""
        if self.integer:
            return str(round(number))
        return str(min(max(float(f"{number:.4g}"), self.low), self.high))
