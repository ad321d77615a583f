"""Whose a tensor is: parameters, gradients and moments, by identity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from megalaunch.engine.deep_plan.memory import MemoryLedger
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.data import units
from megalaunch.engine.train.optimizer import NamedAdamW


@dataclass(frozen=True)
class Owners:
    """What holds tensors from step to step."""

    model: ModelParts
    optimizer: NamedAdamW

    def claim(self, ledger: MemoryLedger) -> None:
        """Tell the ledger of every tensor that is theirs now."""
        parameters = [parameter for part in self.model.parts for parameter in part.parameters()]
        ledger.claim(parameters, "weights")
        ledger.claim((parameter.grad for parameter in (*parameters, *self.optimizer.parameters)), "gradients")
        ledger.claim(self._whole_gradients(), "gradients")

    def claim_moments(self, ledger: MemoryLedger) -> None:
        """Make the moments if they are not there, as in every step but the first, and tell the ledger."""
        ledger.claim(self.optimizer.states().values(), "optimizer")

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        """Sums over microbatches that are reduced at the end of the step only."""
        for parameter in self._sharded():
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):  # it has been gathered before
                yield parameter.unsharded_param.grad

    def _sharded(self) -> Iterator[FSDPParam]:
        for part in self.model.parts:
            for unit in units(part):
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    yield from group.fsdp_params
