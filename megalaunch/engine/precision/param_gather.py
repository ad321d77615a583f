"""What a model part knows of the all-gathers of its weights in 8 bits; parallel/float8_gather.py has them."""

from __future__ import annotations

from typing import Protocol


class ParamGather(Protocol):
    """The all-gathers of fp8 weights of one model part."""

    def attach(self) -> None:
        """Attach the hooks to the shards, once they have memory."""

    def prepare_step(self) -> None:
        """Compute the scales, unless the last update did so. Collective."""

    def compute_scales(self) -> None:
        """Compute the scale of every weight from its current values. Collective."""
