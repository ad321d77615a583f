"""Norms of a parallelized decoder that Transformer Engine computes.

As its linear layers, they hold no parameters: each pass gives them the weight and bias of the norm of the decoder.
Those of heads stay the engine's: Transformer Engine would copy the transposed heads first. So does an addition to the
residual stream that a kernel computes together with the norm after it (kernels/add_norm.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.param_layout import REPLICATED
from megalaunch.engine.precision.transformer_engine import TransformerEngine


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
