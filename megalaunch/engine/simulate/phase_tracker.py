"""Which part of a step an operation belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Phase = Literal["preparing", "forward", "backward", "recompute", "optimizer"]
SHOWN: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class PhaseTracker:
    """Where a rank stands in its step; a backward pass is seen by itself, the rest is told."""

    def __init__(self) -> None:
        self._told: Phase = "preparing"
        self._sent: dict[int, Phase] = {}

    @property
    def phase(self) -> Phase:
        """The phase of the operation that runs now."""
        if self._told == "forward" and torch._C._current_graph_task_id() != -1:
            return "backward"
        return self._told

    @contextmanager
    def phase_scope(self, phase: Phase) -> Iterator[None]:
        """A part of the step: told from outside."""
        before, self._told = self._told, phase
        try:
            yield
        finally:
            self._told = before

    def tag_p2p(self, tensor: Tensor, phase: Phase) -> None:
        """A pipeline sends or receives this tensor later, when operations of several phases meet."""
        self._sent[tensor.untyped_storage()._cdata] = phase

    def p2p_phase(self, tensor: Tensor) -> Phase:
        """The phase of what is sent or received now."""
        return self._sent.get(tensor.untyped_storage()._cdata, self.phase)
