"""What a deep plan found, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveReport:
    """Collectives of one kind, axis and phase in a step: `bytes` of the larger of input and output, of all `count`."""

    phase: str
    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int


@dataclass(frozen=True)
class DeepPlan:
    """One step of one rank.

    `kinds` are bytes at the peak, which is in `phase`; `parameters` those that the rank computes with, `microbatches`
    all of its step, of which `computed` were run (the rest are alike); `on_gpu` says whose operators were assumed.
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
    exchanges: tuple[CollectiveReport, ...]
    seconds: float

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.kinds.values())
