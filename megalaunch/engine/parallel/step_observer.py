"""The interface through which an observer follows a training step; deep plans implement it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch.distributed as dist

Phase = Literal["preparing", "forward", "backward", "recompute", "optimizer"]
"""Phases of a step; "preparing" is everything outside of steps, such as the shape inference of a pipeline."""


class StepObserver:
    """Hooks that the engine calls while it runs a step. These defaults do nothing and cost nothing."""

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for the forward pass of a checkpointed function, and one for its recomputation."""
        return nullcontext(), nullcontext()

    def phase_scope(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context in which the engine runs `phase`."""
        return nullcontext()

    def tag_p2p(self, operations: Sequence[dist.P2POp], phase: Phase) -> None:
        """Note the phase of sends and receives, which a pipeline schedule batches with those of other phases."""


NO_OBSERVER = StepObserver()
