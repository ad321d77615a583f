"""The token embedding, and learned position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalaunch.engine.model.tp_region import TPRegion
from megalaunch.engine.param_layout import COLUMN_PARALLEL, REPLICATED, local_param


class Embedding(nn.Module):
    """Token embedding `weight` [V, H], sharded by row, and `positions` [P, H] where positions are learned.

    Tokens are looked up by the `TPRegion`, since a rank may hold only a shard of the vocabulary.
    """

    layout = COLUMN_PARALLEL
    positions_layout = REPLICATED

    def __init__(self, vocab_size: int, hidden_size: int, positions: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.positions = None if positions is None else nn.Parameter(torch.empty(positions, hidden_size))

    def lookup(self, tokens_BS: Tensor, positions: Tensor, tp_region: TPRegion) -> Tensor:
        """Embed token ids [B, S] at position ids [S] or [B, S] -> [B, s, H]."""
        x_BsH = tp_region.embed(tokens_BS, self)
        if self.scale != 1:
            x_BsH = x_BsH * torch.tensor(self.scale, dtype=x_BsH.dtype)
        if self.positions is None:
            return x_BsH
        return x_BsH + nn.functional.embedding(tp_region.scatter_to_sp(positions), local_param(self.positions))
