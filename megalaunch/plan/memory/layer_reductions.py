"""States during the backward of the layers after the first one, whose gradients are reduced layer by layer.

FSDP2 holds what a reduction sends until the next layer's gradients are reduced: all of the next backward long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.memory.param_bytes import MemoryPhase, ParamBytes
from megalaunch.plan.stage_params import DeviceParams
from megalaunch.plan.stage_validation import splits_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class Sharded:
    """What FSDP2 does with one rank's parameters.

    Attributes:
        per_param: bytes per parameter.
        updated: parameters that the rank updates.
        gathered: parameters that are gathered when the first backward begins.
        earlier: whether an earlier microbatch has left gradients by then.
        sends_copy: a reduction sends a copy of the gradients, which it does not return.
    """

    per_param: ParamBytes
    updated: float
    gathered: float
    earlier: bool
    sends_copy: bool


@dataclass(frozen=True)
class LayerReductions:
    """The phases of later layers; None where there are none, or where the first layer's has as much.

    Attributes:
        next_layer: of the layer after the first, or of the next group of layers that are recomputed together.
        last_layer: of the last layer or group, with the gradients of all others.
        later_layer: of a layer of the second microbatch, with the gradients of the first.
        later_loss: of the loss of the second microbatch, with the first one's gradients of a virtual stage.
        tied: of the embedding, with the gradients of all layers and those of the table that the head shares.
    """

    next_layer: MemoryPhase | None
    last_layer: MemoryPhase | None
    later_layer: MemoryPhase | None
    later_loss: MemoryPhase | None
    tied: MemoryPhase | None

    @classmethod
    def from_spec(cls, spec: RunSpec, topology: Topology, params: DeviceParams, sharded: Sharded) -> LayerReductions:
        """Return those of a resolved spec on one rank."""
        p, recompute, per_param = spec.parallel, spec.recompute, sharded.per_param
        pipelined, accumulates = topology.pp > 1, topology.microbatches > 1
        full_grads = p.data_sharding in ("no_shard", "optim")
        waits_for_whole_pass = splits_backward(p) or (pipelined and full_grads)
        by_layer = p.overlap_grad_reduce and not waits_for_whole_pass
        group = params.layer * (recompute.num_layers if recompute.granularity == "full" else 1)
        whole, layers = params.dense + params.experts, params.chunk if pipelined else params.dense + params.experts
        layers -= params.root  # of embedding and head too, of which a stage may have none
        main = reduced = per_param.main * sharded.updated
        replicated = topology.dp_replicate > 1 and per_param.reduced != per_param.main
        all_reduced = per_param.reduced * sharded.updated if replicated else 0.0  # its buffers are kept until the end
        sums = full_grads and sharded.earlier and per_param.grad == per_param.compute
        head = 0.0 if sums else per_param.compute * params.head  # else added to the earlier gradient at once
        sent = per_param.reduced * params.layer if by_layer and sharded.sends_copy else 0.0

        def after(done: float, gathered: float) -> MemoryPhase:
            """Return the phase after the gradients of `done` parameters, while so many are gathered."""
            if full_grads and (accumulates or pipelined):
                width = per_param.grad if accumulates else per_param.compute
                left = whole - done if by_layer else whole if sharded.earlier else done
                gradients = width * left + (reduced * done / whole if by_layer else 0.0)
            else:
                gradients = reduced if sharded.earlier else reduced * done / whole
            gradients += all_reduced * done / whole
            return MemoryPhase(main + per_param.compute * gathered, gradients, head + sent)

        frees = p.data_sharding == "optim_grads_params"
        frees_last = by_layer and not frees and (full_grads or not accumulates)

        def gathered_after(done: float) -> float:
            return sharded.gathered - done if frees_last else sharded.gathered

        before_last = max(0.0, layers - group)
        last = min(sharded.gathered, params.root + group) if frees else gathered_after(before_last)
        later_layer = later_loss = None
        if pipelined and accumulates and not sharded.earlier:
            weights = main + per_param.compute * sharded.gathered
            gradients = per_param.grad * whole if full_grads else reduced
            later_layer = MemoryPhase(weights, gradients, head + sent)
            later_loss = MemoryPhase(weights, gradients * params.chunk / whole)
        tied = None
        if extra := per_param.compute * tied_gradients(spec, topology, params):
            at_end = after(layers, params.root if frees else gathered_after(layers))
            tied = replace(at_end, buffers=sent + extra)
        return cls(
            after(group, gathered_after(group)) if by_layer and group <= before_last else None,
            after(before_last, last) if before_last else None,
            later_layer,
            later_loss,
            tied,
        )


def tied_gradients(spec: RunSpec, topology: Topology, params: DeviceParams) -> float:
    """Return the size of the gradients of embedding and tied head, at the end of a backward pass; 0 if it has no both.

    The table has a gradient from each, and autograd sums them: in place if the first is a tensor of its own, which it
    is not if it is transposed (of a loss at once) or a DTensor's (of tensor parallelism).
    """
    if not spec.model.tie_word_embeddings or topology.pp > 1:
        return 0.0
    in_place = count_loss_chunks(spec) > 1 and topology.tp == 1
    return (2 if in_place else 3) * params.head + params.root - params.head
