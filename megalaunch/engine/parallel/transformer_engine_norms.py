"""Norms of a parallelized decoder that Transformer Engine computes.

As its linear layers, they hold no parameters: each pass gives them the weight and bias of the norm of the decoder.
Those of heads stay the engine's: Transformer Engine would copy the transposed heads first. So does an addition to the
residual stream that a kernel computes together with the norm after it (kernels/add_norm.py): it moves fewer bytes than
the two apart, also where fused projections could compute the norm. They compute those with no addition before them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.attention.attention import Attention
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.decoder_layer import DecoderLayer
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.mlp import MLP
from megalaunch.engine.param_layout import REPLICATED
from megalaunch.engine.precision.transformer_engine import TransformerEngine
from megalaunch.kernels.overridable import is_overridden, target_name
from megalaunch.schema import RunSpec

_NORMALIZE = target_name(Norm.normalize)


def apply_transformer_engine_norms(model: Decoder, library: TransformerEngine, dtype: torch.dtype) -> None:
    """Let Transformer Engine compute the norms of a decoder over hidden states and latents, in place.

    Args:
        model: The decoder.
        library: Transformer Engine.
        dtype: Of inputs, outputs and weights.
    """
    for norm in model.modules():
        if type(norm) is Norm and norm.layout is REPLICATED:
            norm.library = _TransformerEngineNorm(library, norm, dtype)


def norms_before_projections(model: Decoder, spec: RunSpec, mesh: Mesh) -> dict[Linear, Norm]:
    """Return the norms that can be computed with the projections that follow, by the first of these.

    These are the norms before grouped-query attention and, in layers whose two blocks run in parallel, before the MLP:
    there is no addition between them and the layer's input. Not if an override computes norms, or if the residual
    stream is fp32, since Transformer Engine takes one dtype.
    """
    if spec.precision.residual_dtype == "fp32" or is_overridden(_NORMALIZE, torch.empty(0, device=mesh.device)):
        return {}
    found: dict[Linear, Norm] = {}
    for layer in model.modules():
        if type(layer) is not DecoderLayer:
            continue
        blocks: list[tuple[nn.Module, Attention | MLP]] = []
        if type(layer.attention) is Attention:
            blocks.append((layer.attention_norm, layer.attention))
        if layer.parallel and type(layer.mlp) is MLP:
            blocks.append((layer.mlp_norm, layer.mlp))
        found |= {block.projection_groups[0][0]: norm for norm, block in blocks if type(norm) is Norm}
    return found


class _TransformerEngineNorm:
    """A norm with the settings of one of the decoder (`LibraryNorm`)."""

    def __init__(self, library: TransformerEngine, norm: Norm, dtype: torch.dtype) -> None:
        kind = library.layer_norm if norm.config.layer else library.rms_norm
        self._norm = kind(
            normalized_shape=norm.weight.shape[0],
            eps=norm.config.epsilon,
            zero_centered_gamma=norm.config.zero_centered_gamma,
            device="meta",
            dtype=dtype,
        )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        normed: Tensor = functional_call(self._norm, given, (x,))
        return normed
