"""The table of token vectors."""

from __future__ import annotations

import torch
from torch import nn

from megalaunch.engine.layout import COLUMNS


class Embedding(nn.Module):
    """`weight` [V, H], divided by row; a boundary looks tokens up in it, since a rank may hold a part only."""

    layout = COLUMNS

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
