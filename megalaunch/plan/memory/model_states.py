"""Weights, gradients and optimizer states on one device, by phase of a step: the states that data parallelism shards.

ZeRO (Rajbhandari et al. 2020) in FSDP2's form; `engine/parallel/fsdp.py` has the table of strategies.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from megalaunch.plan.layers import list_layers
from megalaunch.plan.memory.dtypes_and_groups import dtype_bytes
from megalaunch.plan.memory.layer_reductions import LayerReductions, Sharded, tied_gradients
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.memory.param_bytes import DTYPE_BYTES, MemoryPhase, ParamBytes, main_param_bytes, moment_bytes
from megalaunch.plan.memory.phase_states import ModelStates, with_local_experts
from megalaunch.plan.memory.profiles import MemoryProfile
from megalaunch.plan.parameters import layer_parameters
from megalaunch.plan.stage_params import DataShards, DeviceParams
from megalaunch.plan.stage_validation import splits_backward
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.model import GATED, ModelSpec
from megalaunch.schema.optimizer import OptimizerSpec

UPDATE_PIECE = 1 << 22
"""Numbers of a tensor in bf16 that the optimizer updates at once, in fp32: 16 MiB."""
OUTER_BUCKET = 1 << 25
"""Numbers of a device that an outer step all-reduces at once, in fp32: 128 MiB, so that few wait for a far replica."""
GATHERED_LAYERS = 2
"""Layers gathered at once by optim_grads_params: the one that computes, and the next one, prefetched."""


def model_states(
    spec: RunSpec, topology: Topology, params: DeviceParams, profile: MemoryProfile, in_flight: int = 1
) -> ModelStates:
    """Return the states of one rank's parameters, with at most `in_flight` microbatches in flight."""
    data_shards, topology = DataShards.from_topology(topology), topology.gradient_group
    shards, sharded_params = data_shards.dense, data_shards.of(params)
    updated_root = (params.root - params.copies) / shards
    on_device = 1 - spec.optimizer.optimizer_offload_fraction
    layer_bytes = states_per_parameter(spec.optimizer) * moment_bytes(spec) * on_device
    root_bytes = root_states_per_parameter(spec.optimizer) * moment_bytes(spec) * on_device
    root_extra = (root_bytes - layer_bytes) * updated_root
    if profile.sharded_main_params:
        updated = sharded_params - params.copies / shards
        optimizer = layer_bytes * updated + root_extra + outer_state_bytes(spec) * updated
        if topology.dp * topology.cp == 1 and _computes_in_place(spec):
            states = _single_rank(spec, params, topology, optimizer, in_flight)
        elif topology.has_expert_mesh and topology.edp == 1 and _computes_in_place(spec):
            others = params.without_experts()
            states = _fsdp(spec, topology, others, profile, data_shards.of(others), shards, optimizer, in_flight)
            earlier = topology.microbatches > in_flight
            states = with_local_experts(states, params, main_param_bytes(spec), earlier=earlier)
        else:
            states = _fsdp(spec, topology, params, profile, sharded_params, shards, optimizer, in_flight)
        update = None if _updates_at_once(spec, profile) else _update(spec, params, sharded_params, shards)
        if update is not None:  # a search asks for 50,000 states, and replacing nothing is a quarter of their time
            states = replace(states, update=update)
        copies = _weight_copies(spec, params, profile)
        return _with_weight_copies(states, copies) if copies else states
    if not _computes_with_main_params(spec):
        layer_bytes += main_param_bytes(spec) * on_device
    optimizer = layer_bytes * sharded_params + root_extra
    return _distributed_optimizer(spec, params, sharded_params, optimizer, profile)


def _weight_copies(spec: RunSpec, params: DeviceParams, profile: MemoryProfile) -> float:
    """Return the bytes of the copies of weights that Transformer Engine's layers hold; 0 without them.

    Of all weights in 8 bits; under tensor parallelism also of the projections that are fused, in the compute dtype.
    Experts are not fused.
    """
    if not profile.fp8_weight_copy_bytes:
        return 0.0
    model, fp8 = spec.model, spec.precision.fp8
    fused = (spec.parallel.tp > 1) * dtype_bytes(spec.precision.compute_dtype) * _fused_fraction(model)
    layers = 1 - (fp8.first_layers_bf16 + fp8.last_layers_bf16) / model.num_layers
    copies = (profile.fp8_weight_copy_bytes + fused) * (params.dense - params.root)
    return layers * (copies + profile.fp8_weight_copy_bytes * params.experts)


@lru_cache(maxsize=64)
def _fused_fraction(model: ModelSpec) -> float:
    """Return the fraction of the weights outside of experts that is in query, key and value, or in gate and up."""
    layers = [layer_parameters(model, layer) for layer in list_layers(model) if not layer.mtp]
    heads, head_dim = model.num_attention_heads, model.head_dim or 0
    projections = (heads + 2 * (model.num_query_groups or heads)) * head_dim * model.hidden_size
    if model.mla.kv_lora_rank is not None:  # its projections have inputs of their own
        projections = 0
    gate_and_up = 2 / 3 if model.activation in GATED else 0.0
    fused = sum(projections + gate_and_up * (layer.dense_mlp + layer.shared_experts) for layer in layers)
    return fused / sum(layer.total - layer.routed_experts for layer in layers)


def _with_weight_copies(states: ModelStates, size: float) -> ModelStates:
    """Return the states with `size` bytes more in the weights of every phase."""
    larger: dict[str, Any] = {
        name: replace(phase, weights=phase.weights + size)
        for name, phase in vars(states).items()
        if isinstance(phase, MemoryPhase)
    }
    return replace(states, **larger)


def states_per_parameter(optimizer: OptimizerSpec) -> int:
    """Return the optimizer states of a parameter of a layer: AdamW's two moments, or one moment or momentum.

    Those of embedding and head are `root_states_per_parameter`.
    """
    if optimizer.name == "sgd" and optimizer.momentum == 0:
        return 0
    return 2 if optimizer.name == "adamw" else 1


def root_states_per_parameter(optimizer: OptimizerSpec) -> int:
    """Return the optimizer states of a parameter of embedding or head, which muon leaves to AdamW."""
    return 2 if optimizer.name == "muon" else states_per_parameter(optimizer)


def outer_state_bytes(spec: RunSpec) -> int:
    """Return the bytes per parameter of what outer steps keep: outer weights and, unless it is 0, momentum, in fp32."""
    p = spec.parallel
    return 0 if not p.outer_steps else DTYPE_BYTES["fp32"] * (1 + (p.outer_momentum > 0))


def _computes_with_main_params(spec: RunSpec) -> bool:
    """Return whether main parameters have the compute dtype, so that no copies are needed."""
    return spec.precision.compute_dtype == spec.precision.main_params_dtype


def _computes_in_place(spec: RunSpec) -> bool:
    """Return whether the engine computes with main parameters, and accumulates gradients, without copies of either."""
    precision = spec.precision
    width = dtype_bytes(precision.compute_dtype)
    return main_param_bytes(spec) == width and (width == DTYPE_BYTES["fp32"] or precision.grad_dtype == "bf16")


def _fsdp(
    spec: RunSpec,
    topology: Topology,
    params: DeviceParams,
    profile: MemoryProfile,
    sharded_params: float,
    shards: int,
    optimizer: float,
    in_flight: int,
) -> ModelStates:
    """FSDP2: sharded main parameters, from which copies in the compute dtype are all-gathered.

    Of the chunks of a pipeline rank only the active ones have copies, unless each microbatch reduces gradients.
    """
    per_param = ParamBytes.from_spec(spec, topology)
    sharding = spec.parallel.data_sharding
    split_backward = splits_backward(spec.parallel)
    full_grads = sharding in ("no_shard", "optim")  # full gradients until the last microbatch
    accumulates = topology.microbatches > 1
    all_params = params.dense + params.experts
    main_params = reduced_grads = per_param.main * sharded_params  # FSDP2 reduces into the dtype of the parameters
    grads_in_forward = 0.0  # no gradients yet while all microbatches are in flight
    if topology.microbatches > in_flight:
        grads_in_forward = per_param.grad * all_params if full_grads else reduced_grads
    gathered = loss_gathered = params.active if full_grads else all_params
    if sharding == "optim_grads_params":
        loss_gathered = params.root
        gathered = min(all_params, params.root + GATHERED_LAYERS * params.layer)
        if split_backward:  # a whole chunk for each of its two backward passes
            gathered = max(gathered, params.chunk)
    separate_buffers, microbatch_end = profile.separate_reduce_scatter_buffers and shards > 1, None
    if accumulates and (full_grads or sharding == "optim_grads"):
        phase = MemoryPhase(main_params + per_param.compute * gathered, reduced_grads)
        microbatch_end = _fsdp_microbatch_end(spec, topology, params, per_param, phase, shards, separate_buffers)
    sums = full_grads and bool(grads_in_forward) and per_param.grad == per_param.compute  # autograd adds in place
    new = 0 if sums else per_param.compute
    if full_grads and accumulates:
        first = 0 if grads_in_forward else per_param.grad
        grad_reduce = params.layer * (per_param.compute + first + per_param.reduced * separate_buffers)
    else:
        grad_reduce = _layer_reduction(spec, topology, params, per_param, shards, separate_buffers, grads_in_forward)
    if split_backward and not full_grads:  # a chunk's gradients are reduced after the pass that computes them all
        grad_reduce += per_param.compute * (params.chunk - params.layer)
    earlier, shares_buffer = bool(grads_in_forward), shards == 1 and profile.separate_reduce_scatter_buffers
    sharded = Sharded(per_param, sharded_params, gathered, earlier, sends_copy=not shares_buffer)
    later = LayerReductions.from_spec(spec, topology, params, sharded)
    return ModelStates(
        optimizer=optimizer,
        loss=MemoryPhase(main_params + per_param.compute * loss_gathered, grads_in_forward),
        layer=MemoryPhase(main_params + per_param.compute * gathered, grads_in_forward, new * params.head),
        grad_reduce=grad_reduce,
        layer_gradients=new * params.layer,
        sums_each_gradient=sums,
        **vars(later),
        microbatch_end=microbatch_end,
        step_end=_fsdp_step_end(
            spec, topology, params, per_param, sharded_params, shards, full_grads, separate_buffers
        ),
    )


def _layer_reduction(
    spec: RunSpec,
    topology: Topology,
    params: DeviceParams,
    per_param: ParamBytes,
    shards: int,
    separate_buffers: bool,
    earlier_grads: float,
) -> float:
    """Return the bytes of a layer's gradients while they are copied to a reduce-scatter's buffer, or reduced.

    Without those of its weights, if they are freed before. While gradients are reduced, a loop variable of FSDP2's
    `foreach_reduce` holds the last one. `earlier_grads` are the bytes of gradients of earlier microbatches.
    """
    if shards == 1:
        return per_param.reduced * params.layer
    copied = (per_param.compute + per_param.reduced) * params.layer
    reduced = per_param.reduced * (1 + separate_buffers + 1 / shards) * params.layer
    weights, sharding = per_param.compute * params.layer, spec.parallel.data_sharding
    if sharding != "optim_grads_params" and (topology.pp > 1 or topology.microbatches > 2):
        weights = 0.0  # not freed until the last microbatch, which has no more gradients than the one before
    elif sharding == "optim_grads" and topology.microbatches > 1:
        weights = min(weights, earlier_grads)  # the first microbatch has these weights, but no earlier gradients
    return max(copied, reduced + per_param.compute * params.last_matrix) - weights


def _updates_at_once(spec: RunSpec, profile: MemoryProfile) -> bool:
    """Return whether kernels update weights and states in half formats without copies (kernels/fused_update.py)."""
    return profile.fused_update and spec.optimizer.name != "sgd"


def _update(spec: RunSpec, params: DeviceParams, sharded_params: float, shards: int) -> MemoryPhase | None:
    """Return the phase of the update: the largest matrix needs copies in fp32 of what is in bf16, piece by piece.

    Nothing is updated on the device if all states are in host memory.
    """
    main = main_param_bytes(spec)
    copies = 2 * (main < DTYPE_BYTES["fp32"])  # weights and gradients
    copies += states_per_parameter(spec.optimizer) * (spec.precision.exp_avg_dtype != "fp32")
    if not copies or spec.optimizer.optimizer_offload_fraction == 1:
        return None
    piece = min(UPDATE_PIECE, max(params.head, params.layer) / shards)
    return MemoryPhase(main * sharded_params, main * sharded_params, copies * DTYPE_BYTES["fp32"] * piece)


def _fsdp_microbatch_end(
    spec: RunSpec,
    topology: Topology,
    params: DeviceParams,
    per_param: ParamBytes,
    sharded: MemoryPhase,
    shards: int,
    separate_buffers: bool,
) -> MemoryPhase:
    """Return the phase at the end of a microbatch that is not the last; `sharded` has weights and reduced gradients.

    The weights are all-gathered until the last microbatch. Gradients are accumulated, or reduced (ZeRO-2).
    """
    tied = per_param.compute * tied_gradients(spec, topology, params)
    if spec.parallel.data_sharding != "optim_grads":
        all_grads, new = per_param.grad * (params.dense + params.experts), params.root
        if splits_backward(spec.parallel):  # a chunk's gradients are accumulated after the pass that computes them all
            new = max(params.root, params.chunk)
        return replace(sharded, gradients=all_grads, buffers=max(per_param.compute * new, tied))
    accumulates = topology.microbatches > 2  # the first microbatch has no earlier gradients; the last one is step_end
    copies = 2 if separate_buffers else 1
    held = per_param.compute * _last_root_matrix(spec, params) / params.root if params.root else 0.0
    reducing = _grad_reduce_buffer(per_param.compute, per_param, shards, copies, held, accumulate=accumulates)
    return replace(sharded, buffers=max(reducing * params.root, tied))


def _last_root_matrix(spec: RunSpec, params: DeviceParams) -> float:
    """Return the size of the matrix at the end of the parameters of the root; 0 if a vector is there.

    While FSDP2's `foreach_reduce` reduces, a loop variable of it holds that gradient. A loss in chunks has the
    gradient of the head already in the dtype of the reduction.
    """
    if params.head:
        return 0.0 if spec.model.tie_word_embeddings or count_loss_chunks(spec) > 1 else params.head
    return 0.0 if spec.model.position_embedding == "learned" else params.root


def _fsdp_step_end(
    spec: RunSpec,
    topology: Topology,
    params: DeviceParams,
    per_param: ParamBytes,
    sharded_params: float,
    shards: int,
    full_grads: bool,
    separate_buffers: bool,
) -> MemoryPhase:
    """Return the phase in which the gradients of embedding and head are reduced."""
    main_params = per_param.main * sharded_params
    all_params = params.dense + params.experts
    all_reduces = shards == 1 and topology.dp * topology.cp > 1  # every rank is a replica
    copies = 2 if all_reduces or separate_buffers else 1
    if topology.pp > 1 and full_grads:  # embedding and head are reduced first, while layers have full gradients
        reduction = _grad_reduce_buffer(
            per_param.grad, per_param, shards, copies, 0.0, accumulate=False, replicated=True
        )
        result = max(per_param.main, per_param.reduced) / shards
        reducing = params.root * max(per_param.grad, reduction + result - per_param.grad)
        weights = main_params + per_param.compute * max(0.0, params.active - params.root)
        return MemoryPhase(weights, per_param.grad * all_params, reducing)
    accumulates = topology.microbatches > 1
    source = per_param.grad if accumulates and full_grads else per_param.compute
    accumulate = accumulates and not full_grads
    replicated = topology.dp_replicate > 1 or all_reduces
    held = source * _last_root_matrix(spec, params) / params.root if shards > 1 and params.root else 0.0
    buffer = _grad_reduce_buffer(source, per_param, shards, copies, held, accumulate=accumulate, replicated=replicated)
    reducing = params.root * buffer
    if replicated and per_param.reduced != per_param.main:
        reducing += per_param.reduced * sharded_params  # the replicas' all-reduce keeps its buffers until the end
    return MemoryPhase(main_params, main_params, reducing)


def _grad_reduce_buffer(
    source: int,
    per_param: ParamBytes,
    shards: int,
    copies: int,
    held: float,
    *,
    accumulate: bool,
    replicated: bool = False,
) -> float:
    """Return the bytes per parameter of the buffers of a reduce-scatter, in addition to its result.

    Gradients are first converted from `source` bytes, then reduced with `copies` buffers allocated: two if all ranks
    are replicas or if received shards have a separate buffer; then, if main parameters have another dtype, converted
    to it; then, with `accumulate`, accumulated. Of `replicated` shards the result in the dtype of the reduction is kept
    for the all-reduce, and counted elsewhere. `held` are the bytes of the last gradient, which exists meanwhile.
    """
    converting = source + per_param.reduced - (0.0 if accumulate else per_param.main / shards)
    reducing = per_param.reduced * copies + (per_param.reduced / shards if accumulate else 0.0)
    if per_param.main < per_param.reduced and not replicated:
        result = per_param.main if accumulate else 0
        reducing = per_param.reduced * copies + (per_param.reduced + result) / shards
    return max(converting, reducing + held)


def _single_rank(
    spec: RunSpec, params: DeviceParams, topology: Topology, optimizer: float, in_flight: int
) -> ModelStates:
    """One data-parallel rank that computes with the main parameters; gradients are not copied."""
    all_params, accumulates = params.dense + params.experts, topology.microbatches > 1
    main_bytes = main_param_bytes(spec)
    gradient = main_bytes
    weights, all_grads = main_bytes * all_params, gradient * all_params
    earlier_grads = topology.microbatches > in_flight  # no gradients yet while all microbatches are in flight
    grads_in_forward = all_grads if earlier_grads else 0.0
    tied = gradient * tied_gradients(spec, topology, params)
    if not accumulates:  # then their sum becomes the gradient
        tied -= min(tied, gradient * params.root)
    return ModelStates(
        optimizer=optimizer,
        loss=MemoryPhase(weights, grads_in_forward),
        layer=MemoryPhase(weights, grads_in_forward, 0.0 if earlier_grads else gradient * params.head),
        grad_reduce=0.0 if earlier_grads else gradient * params.layer,
        next_layer=None,
        last_layer=None if accumulates else MemoryPhase(weights, all_grads * _finished_grad_fraction(params)),
        later_layer=MemoryPhase(weights, all_grads) if accumulates and not earlier_grads else None,
        microbatch_end=MemoryPhase(weights, all_grads) if accumulates and not earlier_grads else None,
        later_loss=None,
        tied=MemoryPhase(weights, all_grads, tied) if tied else None,
        step_end=MemoryPhase(weights, all_grads, gradient * (params.root - params.head) if accumulates else 0.0),
        sums_each_gradient=accumulates,
    )


def _finished_grad_fraction(params: DeviceParams) -> float:
    """Return the fraction of gradients that exist during the last layer's backward: not its own nor the embedding's."""
    return max(0.0, 1 - (params.layer + params.root - params.head) / (params.dense + params.experts))


def _distributed_optimizer(
    spec: RunSpec, params: DeviceParams, sharded_params: float, optimizer: float, profile: MemoryProfile
) -> ModelStates:
    """Full weights and gradients, sharded main parameters and moments: Megatron's distributed optimizer."""
    compute_bytes = dtype_bytes(spec.precision.compute_dtype)
    weight: float = compute_bytes
    if spec.precision.compute_dtype == "fp8":
        weight = profile.fp8_weight_copy_bytes + (0 if spec.precision.fp8.param_gather else compute_bytes)
    # Embedding and head have no 8-bit copies.
    weights = weight * (params.dense + params.experts - params.root) + compute_bytes * params.root
    grads = params.dense + params.experts
    if spec.parallel.data_sharding == "optim_grads_params":
        weights, grads = compute_bytes * sharded_params, sharded_params
    phase = MemoryPhase(weights, DTYPE_BYTES[spec.precision.grad_dtype] * grads)
    return ModelStates(optimizer, phase, phase, 0.0, None, None, None, None, None, None, phase, sums_each_gradient=True)
