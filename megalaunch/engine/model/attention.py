"""Grouped-query self-attention.

Shapes: B batch, S queries, T keys, H hidden, N query heads, G key/value groups, D head dim.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from megalaunch.engine.layout import COLUMNS, ROWS, ParamLayout
from megalaunch.engine.model.boundary import ONE_DEVICE, Boundary
from megalaunch.engine.model.context import Attend
from megalaunch.engine.model.linear import Linear
from megalaunch.engine.model.rope import Rotation, rotate


class KeyValueStore(Protocol):
    """What one layer remembers of earlier positions while text is generated."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, G, S, D] of the new positions; return those of all positions, [B, G, T, D]."""


class Attention(nn.Module):
    """Causal attention; each of the G key/value heads serves N / G query heads."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_groups: int, head_dim: int, boundary: Boundary = ONE_DEVICE
    ) -> None:
        super().__init__()
        self.head_dim, self.boundary = head_dim, boundary
        groups = ParamLayout(split=0, pieces=num_groups)
        self.q_proj = Linear(hidden_size, num_heads * head_dim, COLUMNS)
        self.k_proj = Linear(hidden_size, num_groups * head_dim, groups)
        self.v_proj = Linear(hidden_size, num_groups * head_dim, groups)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, ROWS)

    def forward(
        self,
        x_BSH: Tensor,
        rotation: Rotation,
        attend: Attend,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H]; with a store the keys of earlier positions are seen too."""
        queries, keys, values = self.boundary.enter(x_BSH, self.q_proj, self.k_proj, self.v_proj)
        q_BNSD = rotate(self._heads(queries), rotation)
        k_BGTD = rotate(self._heads(keys), rotation)
        v_BGTD = self._heads(values)
        if store is not None:
            k_BGTD, v_BGTD = store.extend(k_BGTD, v_BGTD)
        out_BNSD = self.core(attend, q_BNSD, k_BGTD, v_BGTD)
        return self.boundary.leave(out_BNSD.transpose(1, 2).flatten(2), self.o_proj)

    def core(self, attend: Attend, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What lies between the projections."""
        return attend(queries, keys, values)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim).transpose(1, 2)
