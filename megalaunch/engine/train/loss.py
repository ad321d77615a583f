"""The one loss rule: summed token losses divided by the global number of valid tokens, before backward."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # label of a position that has no loss


def summed_token_loss(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum of the cross-entropies of all labels that are not IGNORED, in fp32 nats: a scalar."""
    return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED, reduction="sum")
