"""The token dispatcher: brings tokens to their experts and the experts' outputs back; here for ranks with all experts.

`parallel/expert_parallel.py` has the dispatchers that send tokens to other ranks.
Shapes: T tokens of this rank, k experts per token, R rows of this rank's experts, E its experts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megalaunch.kernels.permute import Permutation, permute, sort_by_expert, unpermute


@dataclass(frozen=True)
class Dispatched:
    """Tokens at their experts.

    Attributes:
        rows_RH: A token for each row, in the order of this rank's experts.
        offsets_E: int32; the rows of expert e end before offsets[e].
        state: What `combine` of the same dispatcher needs.
    """

    rows_RH: Tensor
    offsets_E: Tensor
    state: Any


class TokenDispatcher(Protocol):
    """Brings tokens to the ranks of their experts, and the weighted sums of the outputs back."""

    def dispatch(self, x_TH: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Dispatched:
        """Return the rows of this rank's experts. Collective over expert-parallel ranks."""

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, [R, H] -> [T, H]. Collective like `dispatch`."""


@dataclass(frozen=True)
class LocalDispatcher:
    """The dispatcher of a rank that holds all experts: no communication."""

    num_experts: int

    def dispatch(self, x_TH: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Dispatched:
        """Sort the tokens by expert."""
        permutation, counts_E = sort_by_expert(expert_ids_Tk, self.num_experts)
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        return Dispatched(permute(x_TH, permutation), offsets_E, (permutation, weights_Tk))

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the outputs per token."""
        permutation, weights_Tk = dispatched.state
        assert isinstance(permutation, Permutation)
        return unpermute(y_RH, permutation, weights_Tk)
