"""fp8 linear layers of a parallelized decoder: which layers, and over which ranks an amax is reduced.

A scale of a whole tensor, or of a whole row, does not depend on how it is sharded: its amax is the maximum over the
ranks that hold its shards. Blocks are part of one shard (`plan/rules/float8.py`). So the layout changes no scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megalaunch.engine.collectives import all_reduce_max
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.transformer_block import TransformerBlock
from megalaunch.engine.param_layout import ParamLayout
from megalaunch.engine.precision.amax_history import AmaxHistories, LayerAmax
from megalaunch.engine.precision.float8 import Float8Matmuls, LinearDim, operand_dtypes
from megalaunch.schema import RunSpec
from megalaunch.schema.precision import Float8Spec


def apply_float8(model: Decoder, spec: RunSpec, mesh: Mesh) -> None:
    """Let the linear layers of the transformer layers compute in fp8, in place; call it before compilation.

    Embedding, output head, norms, routers and the gate of shared experts stay in bf16, and so do the first and last
    layers that `precision.fp8` names.
    """
    if spec.precision.compute_dtype != "fp8":
        return
    settings, chosen = spec.precision.fp8, dict(_float8_linears(model, spec.precision.fp8))
    histories = None
    if settings.recipe == "delayed":
        histories = AmaxHistories(
            list(chosen),
            settings.amax_history_len,
            operand_dtypes(settings),
            settings.margin,
            mesh.device,
        )
    model.amax_histories = histories
    for index, linear in enumerate(chosen.values()):
        axes = _sharding_axes(linear.layout, mesh, bool(spec.parallel.sequence_parallel))
        delayed = None if histories is None else LayerAmax(histories, index)
        linear.matmuls = Float8Matmuls(settings, spec.precision.emulate, partial(_reduce_amax, axes), delayed)


def begin_float8_step(model: ModelParts) -> None:
    """Begin a step of delayed scaling."""
    for histories in _histories(model):
        histories.begin_step()


def end_float8_step(model: ModelParts, mesh: Mesh) -> None:
    """Compute the delayed scales of the next step. Collective over the ranks of a pipeline stage."""
    for histories in _histories(model):
        histories.end_step(partial(_reduce_over_stage, mesh))


def float8_states(model: ModelParts) -> Mapping[str, Tensor]:
    """Return the amax histories of this rank's stages, for checkpoints: global tensors by name."""
    return {name: state for histories in _histories(model) for name, state in histories.states().items()}


def restore_float8(model: ModelParts) -> None:
    """Compute the delayed scales from histories that were loaded."""
    for histories in _histories(model):
        histories.restored()


def _histories(model: ModelParts) -> Iterator[AmaxHistories]:
    return (part.amax_histories for part in model.parts if part.amax_histories is not None)


def _float8_linears(model: Decoder, settings: Float8Spec) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers that compute in fp8, by name; MTP depths are not counted as last layers."""
    total = model.config.num_layers
    for name, layer in model.layers.items():
        if settings.first_layers_bf16 <= int(name) < total - settings.last_layers_bf16:
            assert isinstance(layer, TransformerBlock)
            gate = None if layer.moe_layer is None else layer.moe_layer.shared_expert_gate
            for inner, module in layer.named_modules():
                if isinstance(module, Linear) and module is not gate:
                    yield f"layers.{name}.{inner}", module


def _sharding_axes(layout: ParamLayout, mesh: Mesh, sequence_parallel: bool) -> Mapping[LinearDim, tuple[Axis, ...]]:
    """Return the mesh axes along which each dim of a linear layer is sharded, as its matmuls see it.

    Tokens are sharded over cp, and over tp too in a replicated layer under sequence parallelism. Column parallel layers
    shard output features over tp, row parallel layers input features.
    """
    tokens = (mesh.tp, mesh.cp) if layout.shard_dim is None and sequence_parallel else (mesh.cp,)
    return {
        LinearDim.TOKENS: tokens,
        LinearDim.OUT_FEATURES: (mesh.tp,) if layout.shard_dim == 0 else (),
        LinearDim.IN_FEATURES: (mesh.tp,) if layout.shard_dim == 1 else (),
    }


def _reduce_amax(axes: Mapping[LinearDim, tuple[Axis, ...]], dims: Sequence[LinearDim], amax: Tensor) -> Tensor:
    for dim in dims:
        for axis in axes[dim]:
            amax = all_reduce_max(amax, axis)
    return amax


def _reduce_over_stage(mesh: Mesh, amax: Tensor) -> Tensor:
    """Return the maximum over the ranks of this rank's pipeline stage: tp, cp and dp."""
    grid = mesh.world_mesh
    with torch.no_grad():
        for name in ("tp", "dp_shard", "dp_replicate"):
            amax = all_reduce_max(amax, Axis.from_mesh(grid, name))
    return amax
