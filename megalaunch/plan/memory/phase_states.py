"""States of a rank in each phase of a step that may have its peak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megalaunch.plan.memory.param_bytes import MemoryPhase
from megalaunch.plan.stage_params import DeviceParams


@dataclass(frozen=True)
class ModelStates:
    """Bytes on one device.

    Attributes:
        loss: during the backward of the loss.
        layer: during the backward of a layer, the first of a microbatch that holds most activations.
        grad_reduce: gradients of a layer while they are reduced.
        next_layer: during the backward of the layer after it, while the gradients of one are in flight; None if none
            are.
        layer_gradients: of a layer whose backward has ended, before they are reduced.
        last_layer: during the backward of the last layer, with the gradients of all other layers; None where `layer`
            has as much.
        later_layer: during the backward of a layer of the second microbatch, with the gradients of the first; None
            where `layer` has them.
        later_loss: during the backward of the loss of the second microbatch of a virtual stage, with its gradients of
            the first; None where `loss` has them.
        tied: at the end of a backward, with the gradients of a table that embedding and head share; None if they do
            not, and of every microbatch but the last, of which `microbatch_end` has them.
        microbatch_end: at the end of the backward of a microbatch that is not the last.
        step_end: at the end of the last one, when gradients of embedding and head are reduced.
        update: during the update of tensors in bf16, which is computed in fp32; None if it needs no copies.
        sums_each_gradient: each weight's gradient is added to that of earlier microbatches as soon as it is computed.
    """

    optimizer: float
    loss: MemoryPhase
    layer: MemoryPhase
    grad_reduce: float
    next_layer: MemoryPhase | None
    last_layer: MemoryPhase | None
    later_layer: MemoryPhase | None
    later_loss: MemoryPhase | None
    tied: MemoryPhase | None
    microbatch_end: MemoryPhase | None
    step_end: MemoryPhase
    update: MemoryPhase | None = None
    layer_gradients: float = 0.0
    sums_each_gradient: bool = False


def with_local_experts(states: ModelStates, params: DeviceParams, width: float, *, earlier: bool) -> ModelStates:
    """Return the states with routed experts that no other data-parallel rank has, where FSDP2 leaves them alone.

    It does where they are computed with their main parameters: they need no copies, and no reduction of gradients.

    Args:
        states: those of all other parameters.
        params: all parameters of the rank.
        width: bytes of a number of weights and gradients.
        earlier: whether an earlier microbatch has left gradients.
    """
    layer, whole = width * params.layer_experts, width * params.experts
    before = whole if earlier else 0.0
    gradients = {
        "loss": before,
        "layer": before,
        "next_layer": max(before, layer),
        "last_layer": max(before, whole - layer),
        "later_loss": whole * params.chunk / (params.dense + params.experts),
    }
    larger: dict[str, Any] = {
        name: replace(phase, weights=phase.weights + whole, gradients=phase.gradients + gradients.get(name, whole))
        for name, phase in vars(states).items()
        if isinstance(phase, MemoryPhase)
    }
    if not earlier:
        larger |= {"grad_reduce": states.grad_reduce + layer, "layer_gradients": states.layer_gradients + layer}
    return replace(states, **larger)
