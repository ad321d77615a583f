"""From a run spec to everything a loop works on: mesh, sharded model, optimizer, data."""

from __future__ import annotations

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.data.errors import DataError
from megalaunch.data.row import Rows
from megalaunch.data.source import open_training, open_validation
from megalaunch.data.validation_samples import FiniteRows
from megalaunch.engine.ending import Problem
from megalaunch.engine.families.registry import build_decoder
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.context import WHOLE_SAMPLE, Context
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import initialise
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.compile import compile_layers
from megalaunch.engine.parallel.context import ContextParallel
from megalaunch.engine.parallel.data import shard
from megalaunch.engine.parallel.dealt_context import DealtContext
from megalaunch.engine.parallel.offload import offload
from megalaunch.engine.parallel.pipeline import keep_stage
from megalaunch.engine.parallel.recompute import recompute
from megalaunch.engine.parallel.tensor import TensorParallel, divide
from megalaunch.engine.parallel.tied import renew_tied_head
from megalaunch.engine.precision.policy import narrow_format, reduce_format, sharding_policy
from megalaunch.engine.train.agreement import end_together
from megalaunch.engine.train.loop import Trainee
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.passes import passes_of
from megalaunch.plan.stages import Stage, stages_of
from megalaunch.rundir.outcome import ExitCode


def assemble(spec: RunSpec, mesh: Mesh) -> Trainee:
    """Build and open everything but the weights, which the loop draws or loads. Collective.

    Raises an Ending on every rank when any cannot open the tokens.
    """
    model = laid_out(spec, mesh)
    give_memory(model, mesh)
    training, validation = _open_tokens(spec)
    return Trainee(
        spec, mesh, model, passes_of(spec, mesh, model), NamedAdamW(model, spec.optimizer), training, validation
    )


def sharded_model(spec: RunSpec, mesh: Mesh) -> ModelParts:
    """The initialised model, laid out over the mesh: built on meta, so that no rank ever holds more than its part."""
    model = laid_out(spec, mesh)
    give_memory(model, mesh)
    initialise(model, spec.train.seed)
    renew_tied_head(model, mesh)
    return model


def laid_out(spec: RunSpec, mesh: Mesh) -> ModelParts:
    """This rank's part of the model, still on meta."""
    boundary, context = _boundary(spec, mesh), _context(spec, mesh)
    mine = [stage for stage in stages_of(spec) if stage.rank == mesh.pp.rank]
    return ModelParts(*(_part(spec, mesh, stage, boundary, context) for stage in mine))


def give_memory(model: ModelParts, mesh: Mesh) -> None:
    """Move a model from meta to the device; what its parameters hold is still to be drawn or loaded."""
    for part in model.parts:
        part.to_empty(device=mesh.device)
        part.tie()


def _part(spec: RunSpec, mesh: Mesh, stage: Stage, boundary: Boundary, context: Context) -> Decoder:
    with torch.device("meta"):
        part = build_decoder(spec.model, boundary, context, narrow_format(spec.precision))
    keep_stage(part, stage)
    divide(part, mesh.grid["tp"])
    recompute(part, spec.recompute)
    offload(part, spec.recompute.offload_layers)
    if spec.train.compile:
        compile_layers(part)
    shard(part, mesh, spec.parallel, sharding_policy(spec.precision), reduce_format(spec.precision))
    return part


def _boundary(spec: RunSpec, mesh: Mesh) -> Boundary:
    p = spec.parallel
    return TensorParallel(mesh.tp, p.sequence_parallel, p.overlap_tp) if mesh.tp.size > 1 else ONE_DEVICE


def _context(spec: RunSpec, mesh: Mesh) -> Context:
    if mesh.cp.size == 1:
        return WHOLE_SAMPLE
    return DealtContext(mesh.cp) if spec.parallel.cp_dynamic else ContextParallel.of(spec.parallel, mesh)


def _open_tokens(spec: RunSpec) -> tuple[Rows, FiniteRows | None]:
    opened, problem = None, None
    try:
        opened = open_training(spec), open_validation(spec)
    except (DataError, OSError) as error:
        problem = Problem(ExitCode.DATA, str(error))
    end_together(problem, step=0)
    assert opened is not None, "a rank with a problem does not come here"
    return opened
