"""How a rule is written: a small function of a `Situation` that yields what is broken, under an id.

A rule offers fixes freely; the checker shows only those that it has proven to work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megalaunch.config.schema import RunSpec
from megalaunch.plan.findings import Severity

Purpose = Literal["validate", "train"]
Fix = Mapping[str, Any]
"""New values by key; applied together."""


@dataclass(frozen=True)
class Situation:
    """A resolved spec, and whether it is only looked at ("validate") or about to run here ("train")."""

    spec: RunSpec
    purpose: Purpose = "validate"

    @property
    def world(self) -> int | None:
        """Devices in all; None while devices_per_node is open."""
        per_node = self.spec.cluster.devices_per_node
        return self.spec.cluster.nodes * per_node if isinstance(per_node, int) else None

    @property
    def shards(self) -> int:
        """Devices that hold one copy of the model: tp * pp * cp."""
        p = self.spec.parallel
        return p.tp * p.pp * p.cp

    @property
    def dp(self) -> int | None:
        """The data-parallel degree where it is sure: given and equal to what the world leaves."""
        dp = self.spec.parallel.dp
        return dp if dp is not None and dp * self.shards == self.world else None

    @property
    def before_launch(self) -> Severity:
        """Severity of what may still change on a laptop, but not when the run is about to start."""
        return "error" if self.purpose == "train" else "warning"


@dataclass(frozen=True)
class Broken:
    """One violation; `fixes` are candidates, the best first."""

    path: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    severity: Severity = "error"


Check = Callable[[Situation], Iterator[Broken]]


@dataclass(frozen=True)
class Rule:
    """An id, one sentence that says what must hold, and the function that looks."""

    id: str
    sentence: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(id: str, sentence: str) -> Callable[[Check], Check]:
    """Register a check under an id (`domain.what`)."""

    def register(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"two rules have the id {id}")
        RULES[id] = Rule(id, sentence, check)
        return check

    return register
