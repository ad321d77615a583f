"""ZeRO-2 and ZeRO-3 in a pipeline stage: gradients reduced, and parameters freed, with every microbatch.

torch's pipeline runtime all-gathers the units of a stage together, keeps them, and reduces dW once a step: ZeRO-1,
whatever FSDP2 was told. A `ShardedStage` is a plain module to the runtime. Its backward pass of a microbatch is that of
a run without a pipeline,

Forward:   each unit: W = all_gather(W_r), y = f(x, W); with ZeRO-3 W is freed
Backward:  each unit: W = all_gather(W_r) if freed, dx, dW; dW_r += reduce_scatter(dW); with ZeRO-3 W is freed

Zero-bubble schedules compute dx and dW in two passes. dW is reduced after its own. With ZeRO-3 all units of the stage
are all-gathered before either: torch finds the weights of a pass by `parameters()`, which are shards once W is freed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.fsdp import ZERO_STAGES, fsdp_modules, reduce_grads, reduce_grads_if_due, set_grad_sync
from megalaunch.engine.torch_private import accumulate_fsdp_grads
from megalaunch.schema.parallel import ParallelSpec


class ShardedStage(nn.Module):
    """A stage's part of the decoder that gathers and reduces with every microbatch.

    Args:
        part: The stage's part, after `apply_fsdp`.
        parallel: The sharding strategy and the overlap switches.
    """

    def __init__(self, part: Decoder, parallel: ParallelSpec) -> None:
        super().__init__()
        self.part = part
        self._parallel, self._options = parallel, ZERO_STAGES[parallel.data_sharding]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the part returns."""
        return self.part(*args, **kwargs)

    def begin_backward(self, kind: str, last: bool) -> None:
        """Set what FSDP2 does in a backward pass.

        Args:
            kind: "full", or "input" and "weight", the two passes of a zero-bubble schedule.
            last: Whether it is the last pass of the stage in a step that computes gradients of weights.
        """
        set_grad_sync(self.part, self._parallel, last)
        if kind == "full":
            return
        assert isinstance(self.part, FSDPModule), "fully_shard makes it one, in place"
        self.part.set_requires_gradient_sync(False)  # its hooks run in the pass for inputs
        if self._options.reshard_after_forward:
            for unit in fsdp_modules(self.part):
                unit.unshard()

    def end_backward(self, kind: str, last: bool) -> None:
        """Reduce the gradients that the backward pass has not reduced."""
        if kind == "weight":
            for unit in fsdp_modules(self.part):
                accumulate_fsdp_grads(unit, begun=True)
            reduce_grads(self.part, last)
        if kind != "input":
            reduce_grads_if_due(self.part, self._parallel, last)
