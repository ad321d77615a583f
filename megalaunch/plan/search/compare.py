"""Explain why one layout is predicted to be faster than another: the parts of a step that differ most."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.plan.cost import StepTime

_MEANINGS = {
    "matmul": "in matmuls",
    "attention": "in attention",
    "memory": "in memory-bound kernels",
    "head": "in head and loss",
    "recompute": "in recomputation",
    "launch_overhead": "in launch overhead and overlap slowdown",
    "bubble": "in the pipeline bubble",
    "optimizer": "in the optimizer",
    "tp": "in exposed tensor-parallel communication",
    "cp": "in exposed context-parallel communication",
    "ep": "in exposed expert-parallel communication",
    "pp": "in exposed pipeline communication",
    "dp": "in exposed data-parallel communication",
    "outer": "in outer steps",
    "host": "in exposed copies of activations to host memory",
}


@dataclass(frozen=True)
class Difference:
    """Seconds of a step that one layout spends more (below 0: less) than another in one part."""

    part: str
    seconds: float

    @property
    def meaning(self) -> str:
        """`0.42 s less in recomputation`."""
        return f"{abs(self.seconds):.2f} s {'more' if self.seconds > 0 else 'less'} {_MEANINGS[self.part]}"


def differences(faster: StepTime, slower: StepTime) -> list[Difference]:
    """Return the differences of the faster layout to the slower one, the largest first."""
    first, second = _parts(faster), _parts(slower)
    found = [Difference(part, first[part] - second[part]) for part in _MEANINGS]
    return sorted(found, key=lambda difference: -abs(difference.seconds))


def _parts(time: StepTime) -> dict[str, float]:
    compute = ("matmul", "attention", "memory", "head", "recompute", "launch_overhead", "bubble", "optimizer")
    parts = {name: float(getattr(time, name)) for name in compute}
    return dict.fromkeys(_MEANINGS, 0.0) | parts | {axis: e.exposed for axis, e in time.communication.items()}
