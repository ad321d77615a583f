"""The token dispatcher: brings tokens to their experts and the experts' outputs back; here for ranks with all experts.

`parallel/expert_parallel.py` has the dispatchers that send tokens to other ranks.
Shapes: T tokens of this rank, k experts per token, R rows of this rank's experts, E its experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.moe.routing import Routing
from megalaunch.kernels.permute import Permutation, keep_rows, pad_rows, permute, sort_by_expert, unpermute


@dataclass(frozen=True)
class Dispatched:
    """Tokens at their experts.

    Attributes:
        rows_RH: A token for each row, in the order of this rank's experts.
        offsets_E: int32; the rows of expert e end before offsets[e].
        state: What `combine` of the same dispatcher needs.
        counts: Rows of each expert, on the host; None: the dispatcher has not read them.
    """

    rows_RH: Tensor
    offsets_E: Tensor
    state: Any
    counts: Sequence[int] | None = None


Result = TypeVar("Result")


@dataclass(frozen=True)
class Exchange(Generic[Result]):
    """An exchange of tokens that was started: compute before `wait` overlaps with it. Call `wait` exactly once."""

    finish: Callable[[], Result]

    def wait(self) -> Result:
        """Wait for the exchange and return its result."""
        return self.finish()


class TokenDispatcher(Protocol):
    """Brings tokens to the ranks of their experts, and the weighted sums of the outputs back."""

    @property
    def parts(self) -> int:
        """The parts of a microbatch: the exchange of one overlaps with the experts of another."""

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Exchange[Dispatched]:
        """Start to bring tokens to this rank's experts. Collective over expert-parallel ranks."""

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Exchange[Tensor]:
        """Start to return outputs: each token's weighted sum, [R, H] -> [T, H]. Collective like `dispatch`."""


@dataclass(frozen=True)
class SortedRows:
    """This rank's pairs of a token and an expert, as rows in the order of experts.

    Attributes:
        permutation: The order of rows; with `has_spare` one more row, for the pairs that have none.
        counts_E: Rows of each expert, of all ranks' experts.
        weights_Tk: The weight of each pair; 0 for a dropped one.
        padding_R: True for rows without a pair that counts; None: there are none.
        has_spare: The last row of the permutation stands for dropped pairs.
    """

    permutation: Permutation
    counts_E: Tensor
    weights_Tk: Tensor
    padding_R: Tensor | None = None
    has_spare: bool = False

    @classmethod
    def of(cls, routing: Routing, num_experts: int) -> SortedRows:
        """Sort all pairs, dropped ones last; or pad each expert's rows to `routing.padded_rows`."""
        permutation, counts_E = sort_by_expert(routing.expert_ids_Tk, num_experts)
        if routing.padded_rows is None:
            return cls(permutation, counts_E, routing.weights_Tk)
        permutation, padding_R = pad_rows(permutation, counts_E, routing.padded_rows)
        counts_E = torch.full_like(counts_E, routing.padded_rows)
        return cls(permutation, counts_E, routing.weights_Tk, padding_R, has_spare=True)

    def keep(self, rows: int) -> SortedRows:
        """Return the first `rows` rows: all but those of dropped pairs."""
        return replace(self, permutation=keep_rows(self.permutation, rows), has_spare=True)

    def collect(self, x_TH: Tensor) -> Tensor:
        """Return the token of each row, [T, H] -> [R, H]; padding is 0."""
        rows_RH = permute(x_TH, self.permutation)
        rows_RH = rows_RH[:-1] if self.has_spare else rows_RH
        return self._without_padding(rows_RH)

    def sum_up(self, y_RH: Tensor) -> Tensor:
        """Return each token's weighted sum of its rows, [R, H] -> [T, H]."""
        y_RH = self._without_padding(y_RH)
        return unpermute(F.pad(y_RH, (0, 0, 0, 1)) if self.has_spare else y_RH, self.permutation, self.weights_Tk)

    def _without_padding(self, rows_RH: Tensor) -> Tensor:
        """Zero the rows that pad, and their gradients: experts leave both undefined behind their last offset."""
        return rows_RH if self.padding_R is None else rows_RH.masked_fill(self.padding_R[:, None], 0)


@dataclass(frozen=True)
class LocalDispatcher:
    """The dispatcher of a rank that holds all experts: no communication."""

    num_experts: int
    parts: int = 1

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Exchange[Dispatched]:
        """Sort the tokens by expert."""
        rows = SortedRows.of(routing, self.num_experts)
        if routing.drops and rows.padding_R is None:
            # The host does not know how many rows are left: those of dropped pairs, the last ones, count as padding.
            numbers_R = torch.arange(rows.permutation.pairs_R.shape[0], device=x_TH.device)
            rows = replace(rows, padding_R=numbers_R >= rows.counts_E.sum())
        offsets_E = rows.counts_E.cumsum(0).to(torch.int32)
        counts = None if routing.padded_rows is None else [routing.padded_rows] * self.num_experts
        dispatched = Dispatched(rows.collect(x_TH), offsets_E, rows, counts)
        return Exchange(lambda: dispatched)

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Exchange[Tensor]:
        """Sum the outputs per token."""
        assert isinstance(dispatched.state, SortedRows), "of another dispatcher"
        y_TH = dispatched.state.sum_up(y_RH)
        return Exchange(lambda: y_TH)
