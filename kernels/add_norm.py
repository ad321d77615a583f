"""The residual addition with the norm that follows it: h = x + update and the RMSNorm or LayerNorm of h.

Apart, the two read h three times and write it once more than the Triton kernels do, which compute both in one pass each
way. Sources: Zhang and Sennrich 2019 (RMSNorm); Ba et al. 2016 (LayerNorm).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalaunch.kernels.fused_norm import uses_norm_kernel
from megalaunch.kernels.layer_norm import layer_norm_reference
from megalaunch.kernels.overridable import is_overridden, overridable, target_name
from megalaunch.kernels.rms_norm import rms_norm


@overridable
def add_norm(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return h = x + update and its norm in `dtype`, both [..., H], by the fastest form for the device.

    Args:
        x: The residual stream.
        update: The output of a block.
        weight: The norm's weight [H].
        bias: The bias [H] of a LayerNorm; None: RMSNorm.
        epsilon: The norm's epsilon.
        dtype: Of the normed h.
    """
    form = add_norm_fused if _runs_kernel(x, bias) else add_norm_reference
    return form(x, update, weight, bias, epsilon, dtype)


_ADD_NORM, _RMS_NORM = target_name(add_norm), target_name(rms_norm)


def fuses_add_norm(x: Tensor, bias: Tensor | None) -> bool:
    """Return whether `add_norm` does more than call the two operators."""
    return is_overridden(_ADD_NORM, x) or _runs_kernel(x, bias)


def _runs_kernel(x: Tensor, bias: Tensor | None) -> bool:
    # The kernel would bypass an override of RMSNorm.
    return uses_norm_kernel(x) and (bias is not None or not is_overridden(_RMS_NORM, x))


def add_norm_reference(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add, and normalize by the operators that norms use elsewhere."""
    total = x + update
    wide = total.to(torch.promote_types(total.dtype, weight.dtype))
    if bias is None:
        normed = rms_norm(wide, weight.to(wide.dtype), epsilon)
    else:
        normed = layer_norm_reference(wide, weight.to(wide.dtype), bias.to(wide.dtype), epsilon)
    return total, normed.to(dtype)


def add_norm_fused(
    x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add and normalize by the Triton kernels for forward and backward, in fp32 arithmetic whatever the dtype."""
    from megalaunch.kernels import operators

    total, normed, _, _ = operators.add_norm(x, update, weight, bias, epsilon, dtype)
    return total, normed
