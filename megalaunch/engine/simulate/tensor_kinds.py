"""Label the storages of parameters, gradients and optimizer states in the memory tracker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.fsdp import fsdp_modules
from megalaunch.engine.simulate.memory_tracker import MemoryTracker
from megalaunch.engine.torch_private import fsdp_unsharded_grads


@dataclass(frozen=True)
class TensorKinds:
    """The model and optimizer whose tensors persist between steps."""

    model: ModelParts
    optimizer: Optimizer

    def label(self, memory: MemoryTracker) -> None:
        """Label the current parameters and gradients in the memory tracker."""
        parameters = [parameter for part in self.model.parts for parameter in part.parameters()]
        memory.label(parameters, "weights")
        memory.label((parameter.grad for parameter in (*parameters, *self.optimizer.parameters)), "gradients")
        memory.label(self._unsharded_gradients(), "gradients")

    def claim_moments(self, memory: MemoryTracker) -> None:
        """Allocate and label the optimizer's moments and outer weights, which exist in every step but the first."""
        memory.label(self.optimizer.states().values(), "optimizer")
        if self.optimizer.outer is not None:
            memory.label(self.optimizer.outer.states().values(), "optimizer")

    def _unsharded_gradients(self) -> Iterator[Tensor | None]:
        """Yield unsharded gradients, accumulated over microbatches and reduced only at the end of the step."""
        for part in self.model.parts:
            for unit in fsdp_modules(part):
                yield from fsdp_unsharded_grads(unit)
