"""What a sweep word ranges over: a list of values, or an interval to draw from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

Values = Mapping[str, str]
"""One point of a sweep: the value of each axis, as a word's right side."""


@dataclass(frozen=True)
class Categorical:
    """Values as words (`1e-4`, `tp2`), in the order typed."""

    values: tuple[str, ...]

    def draw(self, random: Random) -> str:
        """One of them."""
        return random.choice(self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; `log`: every factor is as likely; `whole`: whole numbers, both ends included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def draw(self, random: Random) -> str:
        """A number as a word; one of four significant digits, since no sweep resolves more."""
        if self.log:
            number = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        else:
            number = random.uniform(self.low, self.high)
        return self.override(number)

    def override(self, number: float) -> str:
        """A number of the interval as a word that can be typed."""
        if self.whole:
            return str(round(number))
        return str(min(max(float(f"{number:.4g}"), self.low), self.high))
