"""Linear cross-entropy: the head's matmul and the loss, for all tokens at once, or in chunks to hold fewer logits.

Shapes: B batch, S sequence, s a rank's shard of it, T tokens (B S), C tokens of a chunk, H hidden, V vocabulary, v a
rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.train.loss import cross_entropy_sum


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Summed token loss of the output of a decoder or its last stage: logits if `takes_logits`, else hidden states."""

    model: Decoder
    chunks: int

    @property
    def takes_logits(self) -> bool:
        """True if the decoder computes the logits; else it returns the head's input, and the loss applies the head."""
        return self.chunks == 1

    def __call__(self, output: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the summed loss, an fp32 scalar, of logits [B, S, v] or of the head's input [B, s, H]."""
        if self.takes_logits:
            return self._logits_loss(output, labels_BS)
        tp_region, head = self.model.tp_region, self.model.head
        assert head is not None, "only the last stage knows a loss"
        x_TH = tp_region.gather_from_sequence_parallel_region(output).flatten(0, 1)
        weight_vH = tp_region.local_param(head.weight, head.layout)
        loss = apply_function(
            _ChunkedLinearCrossEntropy,
            x_TH,
            weight_vH,
            labels_BS.flatten(),
            self._chunk_loss,
            self.chunks,
            torch.is_grad_enabled(),
        )
        return loss

    def _chunk_loss(self, logits_Cv: Tensor, labels_C: Tensor) -> Tensor:
        return self._logits_loss(self.model.softcap_logits(logits_Cv)[None], labels_C[None])

    def _logits_loss(self, logits_BSv: Tensor, labels_BS: Tensor) -> Tensor:
        model = self.model
        return cross_entropy_sum(logits_BSv, labels_BS, model.tp_region.vocab_axis, model.vocabulary_columns)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """Chunked linear cross-entropy. x_c are the tokens of chunk c, W is this rank's shard of the head.

    Forward:   loss = sum_c loss_of(z_c),  z_c = x_c W^T;  dz_c = d loss_of(z_c) / d z_c,
               dx_c = dz_c W,  dW = sum_c dz_c^T x_c
    Backward:  both scaled by the incoming gradient: dx * dloss,  dW * dloss

    Both gradients are computed in forward, while the chunk's logits exist, so that no logits are recomputed in backward
    (as in Liger's fused loss, Hsu et al. 2024). Saved for backward: dx and dW, as large as x and W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_vH: Tensor,
        labels_T: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        chunks: int,
        learns: bool,
    ) -> Tensor:
        size = -(-x_TH.shape[0] // chunks)
        total = torch.zeros((), device=x_TH.device)
        if not learns:
            for x_CH, labels_C in zip(torch.split(x_TH, size), torch.split(labels_T, size), strict=True):
                total += loss_of(F.linear(x_CH, weight_vH), labels_C)
            return total
        dx_TH, dweight_vH = torch.empty_like(x_TH), torch.zeros_like(weight_vH)
        for x_CH, labels_C, dx_CH in zip(*(torch.split(each, size) for each in (x_TH, labels_T, dx_TH)), strict=True):
            loss, dlogits_Cv = _with_gradient(F.linear(x_CH, weight_vH), labels_C, loss_of)
            total += loss
            torch.mm(dlogits_Cv, weight_vH, out=dx_CH)
            dweight_vH.addmm_(dlogits_Cv.T, x_CH)
            del dlogits_Cv  # free it before the next chunk's logits are allocated
        ctx.save_for_backward(dx_TH, dweight_vH)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dweight_vH = ctx.saved_tensors
        return dx_TH * gradients[0], dweight_vH * gradients[0], None, None, None, None


def _with_gradient(
    logits_Cv: Tensor, labels_C: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, and its gradient with respect to the logits."""
    logits_Cv.requires_grad_()
    with torch.enable_grad():
        loss = loss_of(logits_Cv, labels_C)
    (dlogits_Cv,) = torch.autograd.grad(loss, logits_Cv)
    return loss.detach(), dlogits_Cv
