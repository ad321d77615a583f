"""Expert parallelism: each rank holds some of the experts, and tokens are sent to the ranks of their experts.

The experts of a layer are split into blocks over ep, and the width of each expert over etp: rank (e, t) holds shard t
of the experts of block e. All ranks of a pipeline stage have different tokens, whatever their tp, cp and dp.

`AllToAllDispatcher` sends each row to its expert and back: about k / ep of its tokens to each rank.
`AllGatherDispatcher` gathers all tokens everywhere: more data, but no row counts to exchange, and collectives of equal
parts; for few ranks and many experts per token.

Shapes: T tokens of this rank, A = (ep etp) T those of all ranks, k experts per token, R rows of this rank's experts, E
all experts, L this rank's, N = ep etp ranks, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import (
    AsyncCollective,
    all_gather_async,
    all_to_all_async,
    all_to_all_v_async,
    reduce_scatter_async,
)
from megalaunch.engine.dtensor import shard_expert_param
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.moe.dispatcher import Dispatched, Exchange, SortedRows
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.parallel.overlapped_collective import OverlappedCollective
from megalaunch.engine.param_layout import get_param_layout
from megalaunch.kernels.permute import keep_rows, permute, sort_by_expert, unpermute

RowCounts = Callable[[Sequence[Tensor], int], list[list[int]]]
"""Reads vectors of numbers of rows to the host; a simulation has no values, and splits the given total evenly."""


def read_row_counts(counts: Sequence[Tensor], total: int) -> list[list[int]]:
    """Return the numbers as they are: the host waits for the device, once."""
    read = iter(torch.cat(tuple(counts)).tolist())
    return [list(islice(read, vector.numel())) for vector in counts]


@dataclass(frozen=True)
class ExpertBlocks:
    """Which experts are on which of the ranks that exchange tokens.

    Attributes:
        axis: ep, and within it etp.
        num_experts: All experts.
        etp: Ranks that share a block.
    """

    axis: Axis
    num_experts: int
    etp: int = 1

    @property
    def ep(self) -> int:
        """The number of blocks."""
        return self.axis.size // self.etp

    @property
    def num_local(self) -> int:
        """The number of experts of a block."""
        return self.num_experts // self.ep

    @property
    def first(self) -> int:
        """The first expert of this rank."""
        return self.axis.rank // self.etp * self.num_local

    def has_all_rows(self, routing: Routing) -> bool:
        """Return whether each rank computes the rows of all tokens: their number then does not depend on the routing.

        All ranks have equally many tokens, whatever they compute.
        """
        return self.ep == 1 and not routing.drops


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Sends rows, sorted by expert, to the ranks of their experts by an all-to-all, and the outputs back by another.

    With etp > 1 each row is sent to all ranks of its block, and their partial outputs are summed at home.
    """

    blocks: ExpertBlocks
    row_counts: RowCounts = read_row_counts
    parts: int = 1

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Exchange[Dispatched]:
        """Exchange row counts, then rows; sort the received ones, which come in the order of ranks, by expert.

        Padded rows are as many on every rank, so that there are no counts to exchange or to read on the host. Ranks
        that all hold all experts exchange the counts, but need them on the device only.
        """
        blocks, pairs = self.blocks, routing.expert_ids_Tk.numel()
        counts: list[int] | None = None
        rows = SortedRows.of(routing, blocks.num_experts)
        sent_NL = rows.counts_E.view(blocks.ep, -1).repeat_interleave(blocks.etp, dim=0)
        if routing.padded_rows is not None:
            received_NL = sent_NL
            sent = received = [routing.padded_rows * blocks.num_local] * blocks.axis.size
            counts = [routing.padded_rows * blocks.axis.size] * blocks.num_local
        elif blocks.has_all_rows(routing):
            received_NL = all_to_all_async(sent_NL, blocks.axis).wait()
            sent = received = [pairs] * blocks.etp
        else:
            received_NL = all_to_all_async(sent_NL, blocks.axis).wait()
            totals = sent_NL.sum(1), received_NL.sum(1), received_NL.sum(0)
            sent, received, counts = self.row_counts(totals, pairs * blocks.etp)
            rows = rows.keep(sum(sent[:: blocks.etp])) if routing.drops else rows
        rows_RH = rows.collect(x_TH)
        if blocks.etp > 1:
            rows_RH = torch.cat([part for part in torch.split(rows_RH, sent[:: blocks.etp]) for _ in range(blocks.etp)])
        route = _Route(blocks.axis, sent, received)
        arriving = OverlappedCollective(rows_RH, route.send, route.give_back)

        def finish() -> Dispatched:
            arrived = _Arrived.of(received_NL, sum(received))
            offsets_L = received_NL.sum(0).cumsum(0).to(torch.int32)
            return Dispatched(arrived.by_expert(arriving.finish()), offsets_L, (rows, route, arrived), counts)

        return Exchange(finish)

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Exchange[Tensor]:
        """Send the outputs back, and sum them per token."""
        rows, route, arrived = dispatched.state
        assert isinstance(rows, SortedRows), "of another dispatcher"
        returning = OverlappedCollective(arrived.by_rank(y_RH), route.give_back, route.send)

        def finish() -> Tensor:
            y = returning.finish()
            if (etp := self.blocks.etp) > 1:
                parts = torch.split(y, route.sent)
                y = torch.cat([torch.stack(parts[first : first + etp]).sum(0) for first in range(0, len(parts), etp)])
            return rows.sum_up(y)

        return Exchange(finish)


@dataclass(frozen=True)
class AllGatherDispatcher:
    """All-gathers tokens with their experts; each rank picks the rows of its own experts; a reduce-scatter sums up."""

    blocks: ExpertBlocks
    row_counts: RowCounts = read_row_counts
    parts: int = 1

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Exchange[Dispatched]:
        """All-gather tokens, expert ids and weights; keep the rows of this rank's experts, sorted by expert."""
        blocks = self.blocks
        ids = all_gather_async(routing.expert_ids_Tk, 0, blocks.axis)
        x, weights = (
            OverlappedCollective(of_tokens, self._all_gather, self._reduce_scatter)
            for of_tokens in (x_TH, routing.weights_Tk)
        )

        def finish() -> Dispatched:
            ids_Ak = ids.wait() - blocks.first
            is_local = (ids_Ak >= 0) & (ids_Ak < blocks.num_local)
            permutation, counts_L = sort_by_expert(ids_Ak.where(is_local, blocks.num_local), blocks.num_local)
            counts: list[int] | None = None
            rows = ids_Ak.numel()
            if not blocks.has_all_rows(routing):
                (counts,) = self.row_counts((counts_L,), rows // blocks.ep)
                rows = sum(counts)
            permutation = keep_rows(permutation, rows)
            offsets_L = counts_L.cumsum(0).to(torch.int32)
            rows_RH = permute(x.finish(), permutation)[:rows]
            return Dispatched(rows_RH, offsets_L, (permutation, weights.finish()), counts)

        return Exchange(finish)

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Exchange[Tensor]:
        """Sum this rank's rows per token, then the ranks' sums; each rank gets those of its own tokens."""
        permutation, weights_Ak = dispatched.state
        y_AH = unpermute(F.pad(y_RH, (0, 0, 0, 1)), permutation, weights_Ak)
        return Exchange(OverlappedCollective(y_AH, self._reduce_scatter, self._all_gather).finish)

    def _all_gather(self, of_tokens: Tensor) -> AsyncCollective:
        return all_gather_async(of_tokens, 0, self.blocks.axis)

    def _reduce_scatter(self, of_tokens: Tensor) -> AsyncCollective:
        return reduce_scatter_async(of_tokens, 0, self.blocks.axis)


@dataclass(frozen=True)
class _Route:
    """An all-to-all of rows and the way back: `sent` rows from here to each rank, `received` from each rank to here."""

    axis: Axis
    sent: list[int]
    received: list[int]

    def send(self, rows: Tensor) -> AsyncCollective:
        """Send rows to the ranks of their experts."""
        return all_to_all_v_async(rows, self.sent, self.received, self.axis)

    def give_back(self, rows: Tensor) -> AsyncCollective:
        """Return rows to where they came from."""
        return all_to_all_v_async(rows, self.received, self.sent, self.axis)


@dataclass(frozen=True)
class _Arrived:
    """The order of rows that came from several ranks.

    Attributes:
        order_R: The order of the received rows by expert.
        arrival_R: Its inverse.
    """

    order_R: Tensor
    arrival_R: Tensor

    @classmethod
    def of(cls, received_NL: Tensor, total: int) -> _Arrived:
        """Derive the order from the rows received from each rank for each expert, `total` of them."""
        ranks, experts = received_NL.shape
        expert_ids = torch.arange(experts, device=received_NL.device).repeat(ranks)
        expert_of_row = expert_ids.repeat_interleave(received_NL.flatten(), output_size=total)
        order = torch.argsort(expert_of_row, stable=True)
        arrival = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        return cls(order, arrival)

    def by_expert(self, rows: Tensor) -> Tensor:
        """Return rows, in the order of ranks, in that of this rank's experts. Differentiable."""
        return apply_function(_Reorder, rows, self.order_R, self.arrival_R)

    def by_rank(self, rows_RH: Tensor) -> Tensor:
        """Return rows, in the order of this rank's experts, in that of ranks. Differentiable."""
        return apply_function(_Reorder, rows_RH, self.arrival_R, self.order_R)


class _Reorder(torch.autograd.Function):
    """y_i = x_order(i). Backward: the same with the inverse order, a gather where autograd would scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R
        return x.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, ctx.inverse_R), None, None


def shard_expert_params(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace each parameter of routed experts, on meta, by a DTensor over ep and etp."""
    if mesh is None:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (layout := get_param_layout(module, name)).expert:
                module.register_parameter(name, shard_expert_param(parameter, layout, mesh))
