"""Parallelize the decoder: every transformation of the model for one rank, in one place and in one order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalaunch.engine.collectives import all_gather_async, all_reduce_async
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.backends import RUN_KERNELS
from megalaunch.engine.model.attention.core import ContextParallelism, NoContextParallel
from megalaunch.engine.model.attention.documents import DocumentLengths, document_lengths
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.model.layer_modules import STANDARD_MODULES, LayerModules
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.balancing import Balancing
from megalaunch.engine.model.moe.dispatcher import TokenDispatcher
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.parallel.activation_checkpoint import apply_recompute
from megalaunch.engine.parallel.activation_offload import Offload, apply_offload, offload_tensor
from megalaunch.engine.parallel.compile import compile_layers
from megalaunch.engine.parallel.context_parallel import ContextParallel
from megalaunch.engine.parallel.deep_ep import DeepEPDispatcher, make_buffer
from megalaunch.engine.parallel.dynamic_context_parallel import DynamicContextParallel
from megalaunch.engine.parallel.embedding_copies import broadcast_embedding, embedding_copy_ranks
from megalaunch.engine.parallel.expert_parallel import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    ExpertBlocks,
    RowCounts,
    read_row_counts,
    shard_expert_params,
)
from megalaunch.engine.parallel.float8 import apply_float8
from megalaunch.engine.parallel.fsdp import apply_fsdp
from megalaunch.engine.parallel.pipeline_parallel import prune_to_stage
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.engine.parallel.tensor_parallel import TensorParallel, shard_model_params
from megalaunch.engine.precision.policy import block_dtype, grad_reduce_dtype, main_params_dtype, mixed_precision_policy
from megalaunch.engine.torch_private import group_named
from megalaunch.kernels.forms import prescribes_forms
from megalaunch.kernels.overridable import build_for
from megalaunch.plan.attention_backends import DENSE_MASK_TOKENS
from megalaunch.plan.attention_choice import taken_backends
from megalaunch.plan.stage_validation import splits_backward
from megalaunch.plan.stages import build_stages
from megalaunch.schema import RunSpec


@dataclass(frozen=True)
class TensorReaders:
    """The functions of a parallelized model that need values or device memory; a simulation has fake tensors instead.

    Attributes:
        document_lengths: Reads document ids, under context parallelism and in long samples.
        offload: Copies an activation to host memory.
        row_counts: Reads how many rows an expert-parallel rank sends and receives.
    """

    document_lengths: DocumentLengths = document_lengths
    offload: Offload = offload_tensor
    row_counts: RowCounts = read_row_counts


READERS = TensorReaders()


def parallelize_decoder(
    spec: RunSpec,
    mesh: Mesh,
    observer: StepObserver = NO_OBSERVER,
    readers: TensorReaders = READERS,
    modules: LayerModules = STANDARD_MODULES,
) -> ModelParts:
    """Build this rank's pipeline stages on meta and apply all parallelism to them. `materialize` comes next.

    Training, distributed inference and deep plans parallelize their models here. The order, and the reason for it:

    1. Stage: build the decoder on meta, without memory, and remove the layers of other pipeline stages. First, so that
       every later step handles only the modules that this rank computes.
    2. Tensor: replace each parameter by a DTensor sharded over tp. Before FSDP, which shards this rank's tp shard
       further: the global layout is then (dp, tp), as checkpoints expect. The collectives of tp regions are in the
       modules, which get the `TPRegion` when they are built.
    3. Expert: replace each parameter of routed experts by a DTensor sharded over ep and etp. As for tp, FSDP shards it
       further, over edp; the layers get the token dispatcher when they are built.
    4. Context: shards the sequence, not the model. Attention gets it when the decoder is built; no parameter changes.
    5. Recompute: wrap layers, or modules inside them, in activation checkpointing. Before FSDP, whose hooks stay
       outside of the checkpoint: recomputation must not all-gather or reduce a second time.
    6. Offload: install saved-tensor hooks around the first layers, whose modules are not recomputed. Before FSDP, whose
       hooks stay outside of them too.
    7. Float8: let linear layers compute in fp8. Before compilation, whose graphs hold their matmuls.
    8. Compile: compile each layer, checkpoints included. Before FSDP, whose hooks would break the graph.
    9. Shard: apply `fully_shard` to every layer and to the rest of the stage. Last of the wrappers, as its hooks must
       enclose everything that reads a parameter.
    10. Materialize: allocate this rank's shards (`materialize`), then initialize them or load a checkpoint. After all
       else, so that no rank ever holds a full parameter.

    Args:
        spec: The run spec.
        mesh: The device mesh.
        observer: Gets the phases of recomputation.
        readers: Functions that read values or device memory, for a simulation to replace.
        modules: The modules of a layer that replace the standard ones.
    """
    tp_region, context = _make_tp_region(spec, mesh), _make_context_parallel(spec, mesh, readers)
    dispatcher = _make_dispatcher(spec, mesh, readers)
    balancing, dtype = _make_balancing(spec, mesh, tp_region, context), block_dtype(spec.precision)
    parts = []
    for stage in build_stages(spec):
        if stage.rank != mesh.pp.rank:
            continue
        with torch.device("meta"), build_for(mesh.device):
            part = build_decoder(spec.model, tp_region, context, dtype, dispatcher, balancing, modules)
        prune_to_stage(part, stage)
        _set_dtype(part, main_params_dtype(spec.precision))
        shard_model_params(part, mesh.world_mesh["tp"])
        shard_expert_params(part, mesh.expert_shards_mesh)
        apply_recompute(part, spec.recompute, observer, split_backward=splits_backward(spec.parallel))
        apply_offload(part, spec.recompute.cpu_offloading_num_layers, readers.offload)
        apply_float8(part, spec, mesh)
        if spec.train.compile:
            compile_layers(part, _has_eager_attention(spec, mesh))
        precision, reduce = mixed_precision_policy(spec.precision), grad_reduce_dtype(spec.precision)
        apply_fsdp(part, mesh, spec.parallel, precision, reduce)
        parts.append(part)
    copy_embedding = partial(broadcast_embedding, mesh=mesh)
    return ModelParts(*parts, copy_ranks=embedding_copy_ranks(spec), copy_embedding=copy_embedding)


def _set_dtype(part: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype of the parameters of a model on meta; that of buffers, such as expert biases, does not change."""
    for parameter in part.parameters():
        parameter.data = parameter.data.to(dtype)


def materialize(model: ModelParts, mesh: Mesh) -> None:
    """Move a model from meta to the device, and tie the embeddings again.

    Parameters are uninitialized; buffers, such as the bias of aux-loss-free routing, are 0.
    """
    for part in model.parts:
        part.to_empty(device=mesh.device)
        part.tie()
        if part.param_gather is not None:
            part.param_gather.attach()
    for _, buffer in model.named_buffers():
        buffer.zero_()
    for module in model.modules():
        if isinstance(module, Router) and module.previous_load_E is not None:
            module.previous_load_E = torch.zeros_like(module.previous_load_E, device=mesh.device)


def build_sharded_model(spec: RunSpec, mesh: Mesh, modules: LayerModules = STANDARD_MODULES) -> ModelParts:
    """Parallelize, materialize and initialize the model of a run. Collective."""
    model = parallelize_decoder(spec, mesh, modules=modules)
    materialize(model, mesh)
    init_weights(model, spec.train.seed)
    return model


def _make_tp_region(spec: RunSpec, mesh: Mesh) -> TPRegion:
    p = spec.parallel
    return TensorParallel(mesh.tp, bool(p.sequence_parallel), p.tp_comm_overlap) if mesh.tp.size > 1 else NO_TP


def _make_balancing(spec: RunSpec, mesh: Mesh, tp_region: TPRegion, context: ContextParallelism) -> Balancing:
    """Return what routers need to know: the microbatches of a step, and the ranks that share their sequences."""
    batch, tp, cp = spec.batch, mesh.tp, mesh.cp

    def sum_counts(counts: Tensor) -> Tensor:
        return all_reduce_async(all_reduce_async(counts, tp).wait(), cp).wait()

    def gather_tokens(of_tokens: Tensor) -> Tensor:
        return all_gather_async(all_gather_async(of_tokens, 0, tp).wait(), 0, cp).wait()

    def position_ids(tokens: int, device: torch.device) -> Tensor:
        return tp_region.scatter_to_sp(context.position_ids(tokens * tp.size, device))

    microbatches = batch.global_batch_size // (batch.micro_batch_size or 1)
    rank = cp.rank * tp.size + tp.rank
    return Balancing(microbatches, tp.size * cp.size, rank, sum_counts, gather_tokens, position_ids)


def _has_eager_attention(spec: RunSpec, mesh: Mesh) -> bool:
    """Return whether core attention stays out of graphs: it is computed by blocks or a package, or compiles itself."""
    by_blocks = mesh.cp.size > 1 or spec.batch.sequence_length > DENSE_MASK_TOKENS
    return by_blocks or not taken_backends(spec).all.isdisjoint(("flash", "flex", *RUN_KERNELS))


def _make_context_parallel(spec: RunSpec, mesh: Mesh, readers: TensorReaders) -> ContextParallelism:
    """Return how attention is computed. Raises UnknownPackage if the package of its kernel lacks what is called."""
    backends = taken_backends(spec)
    if not prescribes_forms():
        for backend in backends.all & RUN_KERNELS.keys():
            RUN_KERNELS[backend]()
    if mesh.cp.size == 1:
        return NoContextParallel(readers.document_lengths, backends)
    if spec.parallel.dynamic_context_parallel:
        drops = spec.model.attention_dropout > 0
        return DynamicContextParallel(mesh.cp, readers.document_lengths, backends, drops)
    return ContextParallel.build(spec, mesh, readers.document_lengths)


def _make_dispatcher(spec: RunSpec, mesh: Mesh, readers: TensorReaders) -> TokenDispatcher | None:
    if mesh.expert_parallel.size == 1 or spec.model.moe.num_experts is None:
        return None
    blocks = ExpertBlocks(mesh.expert_parallel, spec.model.moe.num_experts, mesh.topology.etp)
    parts = 2 if spec.parallel.overlap_moe_expert_parallel_comm else 1
    match spec.parallel.moe_token_dispatcher_type:
        case "allgather":
            return AllGatherDispatcher(blocks, readers.row_counts)
        case "alltoall":
            return AllToAllDispatcher(blocks, readers.row_counts, parts)
        case "flex":
            buffer = make_buffer(group_named(mesh.expert_parallel.group), spec.model.hidden_size)
            return DeepEPDispatcher(blocks, buffer, parts)
