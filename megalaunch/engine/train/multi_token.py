"""Multi-token prediction in training: the tokens and labels of each depth, and the loss.

Depth k = 1 ... D embeds at position i token i + k, and predicts token i + k + 1 (DeepSeek-V3 report, section 2.2).
Shapes: B batch, S sequence, s a rank's shard of it, H hidden, V vocabulary, v a rank's shard of it, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalaunch.engine.train.loss import IGNORE_INDEX, LinearCrossEntropy


def shift_tokens(
    tokens_BS: Tensor, labels_BS: Tensor, documents_BS: Tensor | None, depths: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens and labels of every depth, [B, D, S] each.

    Those of depth k are shifted by k positions. Where this passes the end of the sample, or of the document if
    documents are kept apart, the token is 0 and the label IGNORE_INDEX, as in Megatron-LM.
    """
    tokens, labels = [], []
    for depth in range(1, depths + 1):
        within = torch.zeros_like(tokens_BS, dtype=torch.bool)
        within[:, :-depth] = True if documents_BS is None else documents_BS[:, depth:] == documents_BS[:, :-depth]
        tokens.append(tokens_BS.roll(-depth, dims=1).where(within, 0))
        labels.append(labels_BS.roll(-depth, dims=1).where(within, IGNORE_INDEX))
    return torch.stack(tokens, dim=1), torch.stack(labels, dim=1)


@dataclass
class TrainingLoss:
    """The loss of a step: loss_0 + coeff / D sum_k loss_k; loss_0 is the decoder's, loss_k that of depth k.

    Each is the mean over its own valid tokens of the global batch. Their sum is multiplied by `scale` for backward.
    """

    token_loss: LinearCrossEntropy
    mtp_coeff: float
    scale: float = 1.0

    @property
    def takes_logits(self) -> bool:
        """True if the decoder computes the logits; else it returns the head's input, and the loss applies the head.

        With MTP depths the head is applied to one depth at a time.
        """
        return self.token_loss.takes_logits and not self.token_loss.model.config.mtp_layers

    def __call__(self, output: Tensor, labels_BDS: Tensor, total_tokens: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return this microbatch's share of the scaled loss, and of each part: unscaled, without gradient, [1 + D].

        Args:
            output: Logits [B, S, v], or the head's input of the decoder and of each depth [(1 + D) B, s, H].
            labels_BDS: Labels [B, 1 + D, S].
            total_tokens: For each of the 1 + D parts its valid tokens in the global batch.
        """
        depths = len(total_tokens) - 1
        apply = self.token_loss if self.takes_logits else self.token_loss.from_hidden
        outputs = output.chunk(1 + depths) if depths else (output,)
        parts = [
            apply(each, labels_BDS[:, number]) / (tokens or 1)
            for number, (each, tokens) in enumerate(zip(outputs, total_tokens, strict=True))
        ]
        loss = parts[0]
        if not depths:
            return self._scaled(loss), loss.detach().view(1)
        for part in parts[1:]:
            loss = loss + self.mtp_coeff / depths * part
        return self._scaled(loss), torch.stack([part.detach() for part in parts])

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scale == 1.0 else loss * self.scale
