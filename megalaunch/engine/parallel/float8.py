"""fp8 linear layers and experts of a parallelized decoder: which layers, and over which ranks an amax is reduced.

A scale of a whole tensor, or of a whole row, does not depend on how it is sharded: its amax is the maximum over the
ranks that hold its shards. Blocks are part of one shard (`plan/rules/float8.py`). So the layout changes no scale.
The rows of an expert are an exception: they come from all samples that its ranks compute at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalaunch.engine.collectives import all_reduce_max
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.experts import GroupedLinear
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.parallel.float8_gather import Float8Layer, Float8ParamGather
from megalaunch.engine.parallel.transformer_engine import apply_transformer_engine
from megalaunch.engine.param_layout import ParamLayout
from megalaunch.engine.precision.amax_history import AmaxHistories, DelayedScales
from megalaunch.engine.precision.float8 import Float8Matmuls, LinearDim, operand_dtypes
from megalaunch.engine.precision.float8_experts import Float8GroupedMatmuls
from megalaunch.engine.precision.param_gather import ParamGather
from megalaunch.engine.precision.policy import compute_dtype
from megalaunch.schema import RunSpec


def apply_float8(model: Decoder, spec: RunSpec, mesh: Mesh) -> None:
    """Let the linear layers and experts of layers and MTP depths compute in fp8, in place; call it before compilation.

    Embedding, output head, norms, routers and the gate of shared experts stay in bf16, and so do the first and last
    layers that `precision.fp8` names.
    """
    if spec.precision.compute_dtype != "fp8":
        return
    settings, emulate, chosen = spec.precision.fp8, spec.precision.emulate, dict(_float8_layers(model, spec))
    if settings.implementation == "transformer_engine":
        apply_transformer_engine(model, chosen, spec, mesh)
        return
    histories = None
    if settings.recipe == "delayed":
        counts = {name: spec.model.moe.num_experts for name, m in chosen.items() if isinstance(m, GroupedLinear)}
        histories = AmaxHistories(
            {name: counts.get(name) for name in chosen},
            settings.amax_history_len,
            operand_dtypes(settings),
            settings.margin,
            mesh.device,
        )
    model.amax_histories = histories
    sequence_parallel, experts = bool(spec.parallel.sequence_parallel), _experts_of_rank(spec, mesh)
    layers = []
    for name, module in chosen.items():
        matmuls: Float8Matmuls | Float8GroupedMatmuls
        if isinstance(module, GroupedLinear):
            delayed = None if histories is None else histories.of_experts(name, experts.start, len(experts))
            reduce_amax = _ExpertReduction.of(module.layout, mesh).maximum
            module.matmuls = matmuls = Float8GroupedMatmuls(settings, emulate, reduce_amax, delayed)
        else:
            delayed = None if histories is None else histories.of_layer(name)
            axes = _sharding_axes(module.layout, mesh, sequence_parallel)
            module.matmuls = matmuls = Float8Matmuls(settings, emulate, partial(_reduce_amax, axes), delayed)
        layers.append(Float8Layer(module, matmuls, delayed))
    if settings.param_gather:
        model.param_gather = Float8ParamGather(layers, mesh, experts, compute_dtype(spec.precision))


def _experts_of_rank(spec: RunSpec, mesh: Mesh) -> range:
    """Return which experts this rank holds, or holds a shard of over etp and edp."""
    count = (spec.model.moe.num_experts or 0) // mesh.topology.ep
    first = mesh.expert_parallel.rank // mesh.topology.etp * count
    return range(first, first + count)


def begin_float8_step(model: ModelParts) -> None:
    """Begin a step of delayed scaling; with weights gathered in fp8, see that they have scales. Collective."""
    for histories in _histories(model):
        histories.begin_step()
    for gather in _gathers(model):
        gather.prepare_step()


@contextmanager
def keep_histories(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context whose passes leave no trace in the histories of these stages: a pipeline's shape inference."""
    with ExitStack() as contexts:
        for stage in stages:
            if isinstance(stage, Decoder) and stage.amax_histories is not None:
                contexts.enter_context(stage.amax_histories.keep())
        yield


def update_float8_scales(model: ModelParts) -> None:
    """After a change of the weights, compute the scales with which they are gathered in fp8. Collective.

    Transformer Engine casts the weights anew in its next pass.
    """
    for layer in (layer for part in model.parts for layer in part.library_layers):
        layer.forget_weights()
    for gather in _gathers(model):
        gather.compute_scales()


def end_float8_step(model: ModelParts, mesh: Mesh) -> None:
    """Compute the delayed scales of the next step, before an update. Collective over the ranks of a pipeline stage.

    A step without an update makes no entry: the next one has its scales, and forgets its amaxes. Transformer Engine
    has made its own entries.
    """
    for histories in _histories(model):
        histories.end_step(partial(_reduce_over_stage, mesh))


def float8_states(model: ModelParts) -> Mapping[str, Tensor]:
    """Return the amax histories of this rank's stages, for checkpoints: global tensors by name."""
    return {name: state for histories in _histories(model) for name, state in histories.states().items()}


def restore_float8(model: ModelParts) -> None:
    """Compute the scales from the histories and weights that were loaded: a validation may be next. Collective."""
    for histories in _histories(model):
        histories.restored()
    update_float8_scales(model)


def _histories(model: ModelParts) -> Iterator[DelayedScales]:
    return (part.amax_histories for part in model.parts if part.amax_histories is not None)


def _gathers(model: ModelParts) -> Iterator[ParamGather]:
    return (part.param_gather for part in model.parts if part.param_gather is not None)


def _float8_layers(model: Decoder, spec: RunSpec) -> Iterator[tuple[str, Linear | GroupedLinear]]:
    """Yield the layers that compute in fp8, by name: of the decoder without first and last ones, and of MTP depths."""
    settings, total = spec.precision.fp8, model.config.num_layers
    chosen: dict[str, nn.Module] = {
        f"layers.{name}": layer
        for name, layer in model.layers.items()
        if settings.first_layers_bf16 <= int(name) < total - settings.last_layers_bf16
    }
    chosen |= {f"mtp.{name}": depth for name, depth in model.mtp.items()}
    for name, part in chosen.items():
        gates = {module.shared_expert_gate for module in part.modules() if isinstance(module, MoELayer)}
        for inner, module in part.named_modules():
            if isinstance(module, Linear | GroupedLinear) and module not in gates:
                yield f"{name}.{inner}", module


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


@dataclass(frozen=True)
class _ExpertReduction:
    """The reduction of an amax of this rank's experts.

    Attributes:
        features: The dim of a grouped linear layer that is sharded over etp, and this axis.
        samples: The axes whose ranks share samples, if they hold the same experts, who get the tokens of one each.
        slots, slot: The ranks of (ep, etp), and this rank's place among them.
    """

    features: tuple[LinearDim, Axis] | None
    samples: tuple[Axis, ...]
    slots: int
    slot: int

    @classmethod
    def of(cls, layout: ParamLayout, mesh: Mesh) -> _ExpertReduction:
        """Return that of a grouped linear layer with this layout."""
        features = None
        if mesh.expert_mesh is not None and mesh.topology.etp > 1:
            dim = LinearDim.OUT_FEATURES if layout.shard_dim == 1 else LinearDim.IN_FEATURES
            features = dim, Axis.from_mesh(mesh.expert_mesh, "etp")
        shared = mesh.expert_parallel.size < mesh.tp.size * mesh.cp.size
        samples = (mesh.tp, mesh.cp) if shared else ()
        return cls(features, samples, mesh.expert_parallel.size, mesh.expert_parallel.rank)

    def maximum(self, dims: Sequence[LinearDim], amax: Tensor) -> Tensor:
        """Return the maximum over the ranks that hold shards of these dims of the same experts."""
        if self.features is not None and self.features[0] in dims:
            amax = all_reduce_max(amax, self.features[1])
        if LinearDim.TOKENS in dims and self.samples:
            of_ranks = amax.new_zeros(self.slots, *amax.shape)
            of_ranks[self.slot] = amax
            for axis in self.samples:
                of_ranks = all_reduce_max(of_ranks, axis)
            amax = of_ranks[self.slot]
        return amax


def _reduce_over_stage(mesh: Mesh, amax: Tensor) -> Tensor:
    """Return the maximum over the ranks of this rank's pipeline stage: tp, cp and dp."""
    grid = mesh.world_mesh
    with torch.no_grad():
        for name in ("tp", "dp_shard", "dp_replicate"):
            amax = all_reduce_max(amax, Axis.from_mesh(grid, name))
    return amax
