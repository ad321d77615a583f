"""Track the phase of a step that an operation belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["preparing", "forward", "backward", "recompute", "optimizer"]
SHOWN: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class PhaseTracker:
    """The current phase of a rank's step. Backward is detected from autograd; other phases are set by `phase_scope`."""

    def __init__(self) -> None:
        self._told: Phase = "preparing"
        self._sent: dict[int, Phase] = {}

    @property
    def phase(self) -> Phase:
        """The phase of the current operation."""
        if self._told == "forward" and torch._C._current_graph_task_id() != -1:
            return "backward"
        return self._told

    @contextmanager
    def phase_scope(self, phase: Phase) -> Iterator[None]:
        """Set the phase within the context."""
        before, self._told = self._told, phase
        try:
            yield
        finally:
            self._told = before

    def tag_p2p(self, tensor: Tensor, phase: Phase) -> None:
        """Set the phase of a tensor's send or recv, which a pipeline batches with those of other phases."""
        self._sent[tensor.untyped_storage()._cdata] = phase

    def p2p_phase(self, tensor: Tensor) -> Phase:
        """Return the phase of a tensor's send or recv; by default the current phase."""
        return self._sent.get(tensor.untyped_storage()._cdata, self.phase)
