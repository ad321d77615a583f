"""Head and loss of a decoder: of all tokens at once, or chunk by chunk, so that few logits exist at a time.

Shapes: B batch, S sequence, s a rank's part of it, T tokens (B S), C tokens of a chunk, H hidden, V vocabulary, v a
rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.train.loss import cross_entropy_sum


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The summed token loss of what a decoder (or the last stage of one) gives; see `takes_logits` for what that is."""

    model: Decoder
    chunks: int

    @property
    def takes_logits(self) -> bool:
        """Whether the decoder gives logits; else the head's input, since the head is part of the loss."""
        return self.chunks == 1

    def __call__(self, output: Tensor, labels_BS: Tensor) -> Tensor:
        """Logits [B, S, v], or the head's input [B, s, H] -> a scalar in fp32."""
        if self.takes_logits:
            return self._logits_loss(output, labels_BS)
        tp_region, head = self.model.tp_region, self.model.head
        assert head is not None, "only the last stage knows a loss"
        x_TH = tp_region.gather_from_sequence_parallel_region(output).flatten(0, 1)
        weight_vH = tp_region.local_param(head.weight, head.layout)
        loss: Tensor = _ChunkedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x_TH, weight_vH, labels_BS.flatten(), self._chunk_loss, self.chunks, torch.is_grad_enabled()
        )
        return loss

    def _chunk_loss(self, logits_Cv: Tensor, labels_C: Tensor) -> Tensor:
        return self._logits_loss(self.model.softcap_logits(logits_Cv)[None], labels_C[None])

    def _logits_loss(self, logits_BSv: Tensor, labels_BS: Tensor) -> Tensor:
        model = self.model
        return cross_entropy_sum(logits_BSv, labels_BS, model.tp_region.vocab_axis, model.vocabulary_columns)


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """sum over chunks of loss(x W^T): both gradients are formed beside the loss, whose gradient then scales them.

    So no logit is computed twice (as in Liger's fused loss, Hsu et al. 2024). What is kept until the backward pass is
    as large as x and W.
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
            del dlogits_Cv  # before the next chunk's come
        ctx.save_for_backward(dx_TH, dweight_vH)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dx_TH, dweight_vH = ctx.saved_tensors
        return dx_TH * gradients[0], dweight_vH * gradients[0], None, None, None, None


def _with_gradient(
    logits_Cv: Tensor, labels_C: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and its gradient by the logits."""
    logits_Cv.requires_grad_()
    with torch.enable_grad():
        loss = loss_of(logits_Cv, labels_C)
    (dlogits_Cv,) = torch.autograd.grad(loss, logits_Cv)
    return loss.detach(), dlogits_Cv
