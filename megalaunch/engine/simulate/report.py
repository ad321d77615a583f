"""The result of a deep plan, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of one kind, axis and phase in a step: `count` calls; `bytes` of the larger of input and output."""

    phase: str
    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


@dataclass(frozen=True)
class DeepPlan:
    """Memory peak and collectives of one step of one rank.

    `kinds` are bytes by kind at the peak, which is in `phase`. `parameters` counts those that the rank computes with.
    `microbatches` are those of a step, of which `computed` were run; the others are extrapolated. `on_gpu`: GPU
    operators were emulated. `seconds` is the time of the simulation.
    """

    rank: int
    world: int
    coordinates: str
    parameters: int
    microbatches: int
    computed: int
    on_gpu: bool
    phase: str
    kinds: dict[str, int]
    collectives: tuple[CollectiveReport, ...]
    seconds: float

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.kinds.values())
