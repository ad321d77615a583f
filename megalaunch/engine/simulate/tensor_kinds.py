"""Whose a tensor is: parameters, gradients and moments, by identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.fsdp import fsdp_modules
from megalaunch.engine.simulate.memory_tracker import MemoryTracker
from megalaunch.engine.train.optimizer import NamedAdamW


@dataclass(frozen=True)
class TensorKinds:
    """What holds tensors from step to step."""

    model: ModelParts
    optimizer: NamedAdamW

    def label(self, ledger: MemoryTracker) -> None:
        """Tell the ledger of every tensor that is theirs now."""
        parameters = [parameter for part in self.model.parts for parameter in part.parameters()]
        ledger.label(parameters, "weights")
        ledger.label((parameter.grad for parameter in (*parameters, *self.optimizer.parameters)), "gradients")
        ledger.label(self._whole_gradients(), "gradients")

    def claim_moments(self, ledger: MemoryTracker) -> None:
        """Make the moments if they are not there, as in every step but the first, and tell the ledger."""
        ledger.label(self.optimizer.states().values(), "optimizer")

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        """Sums over microbatches that are reduced at the end of the step only."""
        for parameter in self._sharded():
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
                yield parameter.unsharded_param.grad

    def _sharded(self) -> Iterator[FSDPParam]:
        for part in self.model.parts:
            for unit in fsdp_modules(part):
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    yield from group.fsdp_params
