"""Linear layers of a parallelized decoder that Transformer Engine computes: which of them as one, over which ranks.

A layer of the decoder keeps its parameters. The layer of Transformer Engine has none with memory: each pass gives it
the weights to compute with. Names, shards and checkpoints are therefore those of any other run. Transformer Engine
casts the weights in the first pass after they changed, and keeps their 8-bit copies for the others.

Projections that share their input are one layer over several tensor-parallel ranks, so that the input is cast and
gathered once. On one rank each is a layer of its own: fusing would cost a copy of their weights. A fused layer also
computes the norm of its input, unless an addition comes before it (`transformer_engine_norms.py`).
The collectives of a tensor-parallel region are Transformer Engine's: it gathers what it has cast to 8 bits.
Shapes: B batch, S sequence, s a rank's shard of it, H input and F output features of this rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.func import functional_call

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.linear import CastsWeights, Linear
from megalaunch.engine.model.moe.experts import Experts, GroupedLinear
from megalaunch.engine.model.moe.moe_layer import MoELayer
from megalaunch.engine.model.tp_region import ProjectionBlock
from megalaunch.engine.parallel.transformer_engine_attention import apply_float8_attention
from megalaunch.engine.parallel.transformer_engine_experts import TransformerEngineExperts
from megalaunch.engine.parallel.transformer_engine_norms import apply_transformer_engine_norms, norms_before_projections
from megalaunch.engine.param_layout import local_param
from megalaunch.engine.precision.policy import compute_dtype
from megalaunch.engine.precision.transformer_engine import Autocast, TransformerEngine, load_transformer_engine
from megalaunch.engine.precision.transformer_engine_histories import HistoriesOfLayer, TransformerEngineHistories
from megalaunch.plan.rules.float8 import ALIGNMENT
from megalaunch.schema import RunSpec


def apply_transformer_engine(
    model: Decoder, layers: Mapping[str, Linear | GroupedLinear], spec: RunSpec, mesh: Mesh
) -> None:
    """Let Transformer Engine compute these layers of a decoder, the experts among them, and all norms, in place.

    Args:
        model: The decoder.
        layers: The layers by the names of their amax histories.
        spec: The run spec.
        mesh: The device meshes.

    Raises:
        UnknownTransformerEngine: It cannot be imported, or lacks something that is called.
    """
    settings = spec.precision.fp8
    library = load_transformer_engine(settings.dot_product_attention)
    is_delayed, dtype = settings.recipe == "delayed", compute_dtype(spec.precision)
    autocast = Autocast(library, settings, mesh.stage_group if is_delayed else None)
    rows = min(ALIGNMENT[settings.recipe], 32)  # blockwise: rows of an expert may end within a block
    apply_transformer_engine_norms(model, library, dtype)
    names = {layer: name for name, layer in layers.items()}
    made: list[CastsWeights] = []
    kept: list[HistoriesOfLayer] = []
    for moe_layer in _with_experts(model, layers.values()):
        moe_layer.library = experts = TransformerEngineExperts(library, autocast, moe_layer.experts, dtype, rows)
        made.append(experts)
        kept.extend(experts.histories(names, spec.model.moe.num_experts or 0))
    norms = norms_before_projections(model, spec, mesh) if mesh.tp.size > 1 else {}
    linear_layers = [layer for layer in layers.values() if isinstance(layer, Linear)]
    for group in _sharing_input(model, linear_layers, mesh.tp.size):
        weights = [model.tp_region.local_param(projection.weight, projection.layout) for projection in group]
        features = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
        sharded = _sharded_over(group[0], spec, mesh)
        norm = norms.get(group[0])
        layer = TransformerEngineLinear(library, autocast, features, dtype, ALIGNMENT[settings.recipe], sharded, norm)
        if norm is not None:
            norm.in_projections = True
        group[0].library = layer
        made.append(layer)
        kept.append(layer.histories([names[projection] for projection in group]))
    if settings.dot_product_attention:
        kept.extend(apply_float8_attention(model, layers, library, autocast, settings, mesh.device))
    model.library_layers = tuple(made)
    if is_delayed:
        model.register_forward_pre_hook(autocast.begin_pass)
        model.register_forward_hook(autocast.end_pass, always_call=True)
        model.checkpoint_contexts = autocast.checkpoint_contexts
        model.amax_histories = TransformerEngineHistories(kept, autocast, partial(_forget_weights, made))


def _forget_weights(layers: Collection[CastsWeights]) -> None:
    for layer in layers:
        layer.forget_weights()


def _with_experts(model: Decoder, layers: Collection[Linear | GroupedLinear]) -> Iterator[MoELayer]:
    """Yield the layers with routed experts whose projections are among `layers`; an override computes its own."""
    chosen = set(layers)
    for block in model.modules():
        if isinstance(block, MoELayer) and type(block.experts) is Experts and block.experts.up_proj in chosen:
            yield block


def _sharing_input(model: Decoder, layers: Collection[Linear], ranks: int) -> Iterator[tuple[Linear, ...]]:
    """Yield the layers, those that share their input together if there are several tensor-parallel ranks."""
    alone = dict.fromkeys(layers)
    if ranks > 1:
        for block in model.modules():
            for group in block.projection_groups if isinstance(block, ProjectionBlock) else ():
                if group[0] in alone:
                    yield group
                    for projection in group:
                        del alone[projection]
    yield from ((layer,) for layer in alone)


def _sharded_over(projection: Linear, spec: RunSpec, mesh: Mesh) -> ShardedOver | None:
    """Return how a layer is sharded over tensor-parallel ranks, None if it is not."""
    dim = projection.layout.shard_dim
    if mesh.tp.size == 1 or dim is None:
        return None
    group = mesh.world_mesh.get_group("tp")
    return ShardedOver("column" if dim == 0 else "row", group, bool(spec.parallel.sequence_parallel))


@dataclass(frozen=True)
class ShardedOver:
    """How a layer is sharded over tensor-parallel ranks.

    Attributes:
        mode: "column": output features are sharded; "row": input features.
        group: The ranks.
        sequence_parallel: A column parallel layer gathers its input along the sequence, and a row parallel one scatters
            the sum of its outputs along it.
    """

    mode: Literal["column", "row"]
    group: ProcessGroup
    sequence_parallel: bool


class TransformerEngineLinear:
    """Projections that share their input, computed as one layer of Transformer Engine (`LibraryLayer`).

    Args:
        library: Transformer Engine.
        autocast: The contexts in which it computes.
        features: H and F; F of all projections together.
        dtype: Of inputs, outputs and weights.
        alignment: Numbers of rows that the recipe can cast are multiples of it.
        sharded: How the layer is sharded; None: every rank has the whole layer, or there is one.
        norm: The norm of the input that the layer computes too; the module keeps its parameters.

    Attributes:
        sequence_parallel: As `ShardedOver`; False of a layer that is not sharded.
    """

    def __init__(
        self,
        library: TransformerEngine,
        autocast: Autocast,
        features: tuple[int, int],
        dtype: torch.dtype,
        alignment: int,
        sharded: ShardedOver | None,
        norm: Norm | None = None,
    ) -> None:
        self._autocast, self._alignment, self._norm = autocast, alignment, norm
        self.sequence_parallel = sharded is not None and sharded.sequence_parallel
        ranks = 1 if sharded is None else sharded.group.size()
        mode = None if sharded is None else sharded.mode
        kind = library.linear if norm is None else partial(library.norm_linear, **_norm_settings(norm))
        self._layer = kind(
            in_features=features[0] * (ranks if mode == "row" else 1),
            out_features=features[1] * (ranks if mode == "column" else 1),
            bias=False,
            params_dtype=dtype,
            device="meta",
            tp_group=None if sharded is None else sharded.group,
            parallel_mode=mode,
            sequence_parallel=self.sequence_parallel,
        )
        self._holds_weights = False
        self._fused_FH: Tensor | None = None

    def accepts(self, x: Tensor) -> bool:
        """Return whether the rows of an input, [..., H], can be cast: in generation there may be any number of them."""
        return x[..., 0].numel() % self._alignment == 0

    def histories(self, names: Sequence[str]) -> HistoriesOfLayer:
        """Return the layer as one that has histories, of the projections with these names."""
        return HistoriesOfLayer(self._layer, names)

    def forget_weights(self) -> None:
        """Cast the weights anew in the next pass: they have changed."""
        self._holds_weights = False

    def __call__(self, x: Tensor, *weights_FH: Tensor) -> tuple[Tensor, ...]:
        """Return x W^T for each weight, or norm(x) W^T: [B, S, H] -> [B, S, F].

        With sequence parallelism a column parallel layer maps [B, s, H] to [B, S, F], and a row parallel one
        [B, S, H] to [B, s, F].
        """
        weight_FH = weights_FH[0] if len(weights_FH) == 1 else apply_function(_FusedWeight, self, *weights_FH)
        if self.sequence_parallel:  # Transformer Engine's collectives are along the first dim
            x = x.transpose(0, 1)
        with self._autocast.of_layer(self._layer):
            named = {"is_first_microbatch": not self._holds_weights}
            given = {"weight": weight_FH, **self._norm_params()}
            y: Tensor = functional_call(self._layer, given, (x.contiguous(),), named)
        self._holds_weights = True
        if self.sequence_parallel:
            y = y.transpose(0, 1)
        return torch.split_with_sizes(y, [weight.shape[0] for weight in weights_FH], dim=-1)

    def normalize_input(self, x: Tensor) -> Tensor:
        """Return the norm of x, if the layer computes one, else x."""
        return x if self._norm is None else self._norm.normalize(x)

    def _norm_params(self) -> dict[str, Tensor]:
        """Return the parameters of the norm by their names in the layer of Transformer Engine."""
        if self._norm is None:
            return {}
        return {f"layer_norm_{name}": local_param(value) for name, value in self._norm.named_parameters()}

    def fuse_weights(self, weights_FH: Sequence[Tensor]) -> Tensor:
        """Return the weights, one below the other; they are copied once after they changed.

        The copy stays: a pass that waits for its backward, as in a pipeline, holds this one instead of its own.
        """
        if self._fused_FH is None:
            self._fused_FH = torch.cat(tuple(weights_FH))
        elif not self._holds_weights:
            torch.cat(tuple(weights_FH), out=self._fused_FH)
        return self._fused_FH.detach()


def _norm_settings(norm: Norm) -> dict[str, Any]:
    """Return the arguments of `LayerNormLinear` for the norm of its input."""
    config = norm.config
    return {
        "normalization": "LayerNorm" if config.layer else "RMSNorm",
        "eps": config.epsilon,
        "zero_centered_gamma": config.zero_centered_gamma,
    }


class _FusedWeight(torch.autograd.Function):
    """The fused weight of a layer, whose gradient is split among the projections."""

    @staticmethod
    def forward(ctx: Any, layer: TransformerEngineLinear, *weights_FH: Tensor) -> Tensor:
        ctx.rows = [weight.shape[0] for weight in weights_FH]
        return layer.fuse_weights(weights_FH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.split_with_sizes(gradients[0], ctx.rows)
