"""Activation functions of the feed-forward block, by their names in `model.activation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from megalaunch.kernels.swiglu import swiglu
from megalaunch.schema.model import Activation


def _gelu_tanh(x: Tensor) -> Tensor:
    """GELU with the tanh approximation of Hendrycks and Gimpel, as in GPT-2."""
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


PLAIN: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
GATED: Mapping[Activation, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: _gelu_tanh(gate) * up,
    "quick_geglu": lambda gate, up: _quick_gelu(gate) * (up + 1),
}
"""Gated activations: (gate, up) -> input of the down projection (Shazeer, 2020)."""


def apply_gated_activation(activation: Activation, gate: Tensor, up: Tensor, *, overwrite_up: bool) -> Tensor:
    """Apply a gated activation; `overwrite_up`: its backward may overwrite `up` (kernels/swiglu.py)."""
    return swiglu(gate, up, overwrite_up=overwrite_up) if activation == "swiglu" else GATED[activation](gate, up)
