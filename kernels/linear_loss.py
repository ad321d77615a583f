"""Cross-entropy of logits by kernels that write the gradient over the logits, and where they run.

The rest of the fused linear and cross-entropy is in engine/train/loss.py, which multiplies chunk by chunk and adds the
collectives of a sharded vocabulary. The kernels take logits in the dtype of the matmul, and no copy in fp32 exists: of
a chunk on one rank a logit is read and its gradient written, 4 bytes in half formats. With a sharded vocabulary it is
read once more, since the ranks' sums meet in between; whole logits are too, since backward writes their gradient.
Operator by operator it is 36 and 60 bytes.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from megalaunch.kernels.forms import LossKernels, kernel_forms, uses_triton
from megalaunch.kernels.overridable import is_overridden


def loss_kernels(logits_Tv: Tensor) -> LossKernels | None:
    """Return the kernels for the device of the logits; None: it has none, or a package replaces `cross_entropy`."""
    form = kernel_forms().loss_kernels
    if form is not None:
        return form
    if not uses_triton(logits_Tv) or is_overridden("kernels.cross_entropy.cross_entropy", logits_Tv):
        return None
    return triton_kernels()


@cache
def triton_kernels() -> LossKernels:
    """Return the Triton form, which imports Triton when it runs."""
    from megalaunch.kernels import operators

    return LossKernels(operators.loss_sums, operators.write_loss_gradient, operators.loss_and_gradient)
