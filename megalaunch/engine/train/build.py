"""Build the training state from a run spec: sharded model, forward and backward passes, optimizer, data sets."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
from megalaunch.data.samples.sample import Dataset
from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.families.build import build_decoder
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.core import NO_CP, ContextParallelism
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.tp_region import NO_TP, TPRegion
from megalaunch.engine.parallel.activation_checkpoint import apply_recompute
from megalaunch.engine.parallel.activation_offload import apply_offload
from megalaunch.engine.parallel.compile import compile_layers
from megalaunch.engine.parallel.context_parallel import ContextParallel
from megalaunch.engine.parallel.dynamic_context_parallel import DynamicContextParallel
from megalaunch.engine.parallel.fsdp import apply_fsdp
from megalaunch.engine.parallel.pipeline_parallel import prune_to_stage
from megalaunch.engine.parallel.tensor_parallel import TensorParallel, shard_model_params
from megalaunch.engine.parallel.tied_embeddings import broadcast_tied_embedding
from megalaunch.engine.precision.policy import block_dtype, grad_reduce_dtype, mixed_precision_policy
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.rank_sync import raise_on_all_ranks
from megalaunch.engine.train.trainer import TrainState
from megalaunch.plan.stages import Stage, build_stages
from megalaunch.rundir.outcome import ExitCode


def build_train_state(spec: RunSpec, mesh: Mesh) -> TrainState:
    """Build the training state without weights, which `Trainer.resume` initializes or loads. Collective.

    Raises:
        RunEnd: On every rank, if any rank cannot open its data.
    """
    model = parallelize_on_meta(spec, mesh)
    materialize(model, mesh)
    training, validation = _open_datasets(spec)
    return TrainState(
        spec,
        mesh,
        model,
        make_forward_backward(spec, mesh, model),
        NamedAdamW(model, spec.optimizer),
        training,
        validation,
    )


def sharded_model(spec: RunSpec, mesh: Mesh) -> ModelParts:
    """Build and initialize the model, sharded over the mesh. Built on meta, so a rank only ever holds its shards."""
    model = parallelize_on_meta(spec, mesh)
    materialize(model, mesh)
    init_weights(model, spec.train.seed)
    broadcast_tied_embedding(model, mesh)
    return model


def parallelize_on_meta(spec: RunSpec, mesh: Mesh) -> ModelParts:
    """Build this rank's pipeline stages on meta and apply all parallelism to them.

    Order for each stage: build, prune to its layers, shard over tp, activation checkpointing, activation offload,
    compile, FSDP.
    """
    tp_region, context = _make_tp_region(spec, mesh), _make_context_parallel(spec, mesh)
    mine = [stage for stage in build_stages(spec) if stage.rank == mesh.pp.rank]
    return ModelParts(*(_parallelize_stage(spec, mesh, stage, tp_region, context) for stage in mine))


def materialize(model: ModelParts, mesh: Mesh) -> None:
    """Move a model from meta to the device, with uninitialized parameters, and tie the embeddings again."""
    for part in model.parts:
        part.to_empty(device=mesh.device)
        part.tie()


def _parallelize_stage(
    spec: RunSpec, mesh: Mesh, stage: Stage, tp_region: TPRegion, context: ContextParallelism
) -> Decoder:
    with torch.device("meta"):
        part = build_decoder(spec.model, tp_region, context, block_dtype(spec.precision))
    prune_to_stage(part, stage)
    shard_model_params(part, mesh.world_mesh["tp"])
    apply_recompute(part, spec.recompute)
    apply_offload(part, spec.recompute.cpu_offloading_num_layers)
    if spec.train.compile:
        compile_layers(part)
    apply_fsdp(part, mesh, spec.parallel, mixed_precision_policy(spec.precision), grad_reduce_dtype(spec.precision))
    return part


def _make_tp_region(spec: RunSpec, mesh: Mesh) -> TPRegion:
    p = spec.parallel
    return TensorParallel(mesh.tp, p.sequence_parallel, p.tp_comm_overlap) if mesh.tp.size > 1 else NO_TP


def _make_context_parallel(spec: RunSpec, mesh: Mesh) -> ContextParallelism:
    if mesh.cp.size == 1:
        return NO_CP
    return (
        DynamicContextParallel(mesh.cp)
        if spec.parallel.dynamic_context_parallel
        else ContextParallel.build(spec.parallel, mesh)
    )


def _open_datasets(spec: RunSpec) -> tuple[Dataset, FiniteDataset | None]:
    opened, problem = None, None
    try:
        opened = build_train_dataset(spec), build_valid_dataset(spec)
    except (DataError, OSError) as error:
        problem = RankError(ExitCode.DATA, str(error))
    raise_on_all_ranks(problem, step=0)
    assert opened is not None, "a rank with a problem does not come here"
    return opened
