"""The figures that training must reach on one H100, beside each of which the report says whether it was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_MODELS = {"Llama-3.2-1B": 0.52, "8B shape, 4 layers": 0.60, "8B shape, 8 layers": 0.60}
"""The causal MFU in bf16."""
_FP8_SPEED = 1.3
"""Tokens per second of these models in fp8, relative to bf16."""
_MEMORY, _TIME = 0.05, 0.10
"""The largest errors of the planner."""


def have_bars(card: str) -> bool:
    """Return whether the bars are stated for a card: an H100 with its full power and memory (SXM)."""
    return re.search(r"\bH100\b(?!.*(PCIe|NVL))", card) is not None


@dataclass
class Verdicts:
    """Says for the rows of a card whether they reach their bars, and counts. Without bars it says nothing."""

    card: str
    met: int = 0
    missed: int = 0

    def mfu(self, row: dict[str, Any]) -> str:
        """Return the verdict on a row's causal MFU, as text after the figure."""
        bar = _MODELS.get(_model(row))
        return "" if bar is None or _precision(row) != "bf16" else self._say(row["mfu_causal"] >= bar, f"{bar:.0%}")

    def fp8_speed(self, row: dict[str, Any], ratio: float) -> str:
        """Return the verdict on the speed of a row in fp8 relative to bf16."""
        return self._say(ratio >= _FP8_SPEED, f"{_FP8_SPEED}x") if _model(row) in _MODELS else ""

    def memory(self, error: float) -> str:
        """Return the verdict on the planner's memory."""
        return self._say(abs(error) <= _MEMORY, f"{_MEMORY:.0%}")

    def time(self, error: float) -> str:
        """Return the verdict on the planner's step time."""
        return self._say(abs(error) <= _TIME, f"{_TIME:.0%}")

    def summary(self) -> str:
        """Return the counts, "" without bars."""
        if not self.met + self.missed:
            return ""
        return f"bars of one H100: {self.met} met, {self.missed} missed"

    def _say(self, is_met: bool, bar: str) -> str:
        if not have_bars(self.card):
            return ""
        self.met, self.missed = self.met + is_met, self.missed + (not is_met)
        return f" ({'met' if is_met else 'MISSED'}: {bar})"


def _model(row: dict[str, Any]) -> str:
    return next((model for model in _MODELS if row["case"].startswith(f"{model}, ")), "")


def _precision(row: dict[str, Any]) -> str:
    return str(row["case"].split(", ")[-1])
