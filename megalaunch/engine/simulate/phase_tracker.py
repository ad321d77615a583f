"""Track the phase of a step that an operation belongs to, simulated or real."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.parallel.step_observer import Phase, StepObserver
from megalaunch.engine.torch_private import is_in_backward, storage_id

SHOWN: tuple[Phase, ...] = ("forward", "backward", "optimizer")


class PhaseTracker(StepObserver):
    """The current phase of a rank's step, as the engine reports it; backward is also detected from autograd."""

    def __init__(self) -> None:
        self._reported: Phase = "preparing"
        self._p2p: dict[int, Phase] = {}

    @property
    def phase(self) -> Phase:
        """The phase of the current operation."""
        if self._reported == "forward" and is_in_backward():
            return "backward"
        return self._reported

    def phase_scope(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context that sets the phase. It may be entered again: a split backward recomputes twice."""
        return _PhaseScope(self, phase)

    def set_phase(self, phase: Phase) -> Phase:
        """Set the phase; return the one that was set before."""
        before, self._reported = self._reported, phase
        return before

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts of the current phase for the forward pass, and of "recompute" for the recomputation."""
        return self.phase_scope(self.phase), self.phase_scope("recompute")

    def tag_p2p(self, operations: Sequence[dist.P2POp], phase: Phase) -> None:
        """Set the phase of sends and receives."""
        for operation in operations:
            self._p2p[storage_id(operation.tensor)] = phase

    def p2p_phase(self, tensor: Tensor) -> Phase:
        """Return the phase of a tensor's send or receive, once: a later storage may have the same number.

        By default it is the current phase.
        """
        return self._p2p.pop(storage_id(tensor), self.phase)


class _PhaseScope(AbstractContextManager[None]):
    """A phase of a tracker; it may be entered several times, also within itself."""

    def __init__(self, tracker: PhaseTracker, phase: Phase) -> None:
        self._tracker, self._phase = tracker, phase
        self._before: list[Phase] = []

    def __enter__(self) -> None:
        self._before.append(self._tracker.set_phase(self._phase))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.set_phase(self._before.pop())
