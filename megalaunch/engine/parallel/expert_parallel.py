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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import all_gather_async, all_to_all_async, all_to_all_v_async, reduce_scatter_async
from megalaunch.engine.dtensor import shard_expert_param
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.moe.dispatcher import Dispatched, SortedRows
from megalaunch.engine.model.moe.routing import Routing
from megalaunch.engine.param_layout import get_param_layout
from megalaunch.kernels.permute import keep_rows, permute, sort_by_expert, unpermute

RowCounts = Callable[[Tensor, int], list[list[int]]]
"""Reads numbers of rows [parts, ranks] to the host; a simulation has no values, and splits the given total evenly."""


def read_row_counts(counts: Tensor, total: int) -> list[list[int]]:
    """Return the numbers as they are: the host waits for the device."""
    read: list[list[int]] = counts.tolist()
    return read


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


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Sends rows, sorted by expert, to the ranks of their experts by an all-to-all, and the outputs back by another.

    With etp > 1 each row is sent to all ranks of its block, and their partial outputs are summed at home.
    """

    blocks: ExpertBlocks
    row_counts: RowCounts = read_row_counts

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """Exchange row counts, then rows; sort the received ones, which come in the order of ranks, by expert.

        Padded rows are as many on every rank, so that there are no counts to exchange or to read on the host.
        """
        blocks = self.blocks
        rows = SortedRows.of(routing, blocks.num_experts)
        sent_NL = rows.counts_E.view(blocks.ep, -1).repeat_interleave(blocks.etp, dim=0)
        if routing.padded_rows is not None:
            received_NL = sent_NL
            sent = received = [routing.padded_rows * blocks.num_local] * blocks.axis.size
        else:
            received_NL = all_to_all_async(sent_NL, blocks.axis).wait()
            totals = torch.stack([sent_NL.sum(1), received_NL.sum(1)])
            sent, received = self.row_counts(totals, routing.expert_ids_Tk.numel() * blocks.etp)
            rows = rows.keep(sum(sent[:: blocks.etp])) if routing.drops else rows
        exchange = _Exchange.build(blocks.axis, sent, received, received_NL)
        rows_RH = rows.collect(x_TH)
        if blocks.etp > 1:
            rows_RH = torch.cat([part for part in torch.split(rows_RH, sent[:: blocks.etp]) for _ in range(blocks.etp)])
        offsets_L = received_NL.sum(0).cumsum(0).to(torch.int32)
        return Dispatched(apply_function(_SendRows, rows_RH, exchange), offsets_L, (rows, exchange))

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the outputs back, and sum them per token."""
        rows, exchange = dispatched.state
        assert isinstance(rows, SortedRows), "of another dispatcher"
        assert isinstance(exchange, _Exchange), "of another dispatcher"
        y_RH = apply_function(_ReturnRows, y_RH, exchange)
        if (etp := self.blocks.etp) > 1:
            parts = torch.split(y_RH, exchange.sent)
            y_RH = torch.cat([torch.stack(parts[first : first + etp]).sum(0) for first in range(0, len(parts), etp)])
        return rows.sum_up(y_RH)


@dataclass(frozen=True)
class AllGatherDispatcher:
    """All-gathers tokens with their experts; each rank picks the rows of its own experts; a reduce-scatter sums up."""

    blocks: ExpertBlocks
    row_counts: RowCounts = read_row_counts

    def dispatch(self, x_TH: Tensor, routing: Routing) -> Dispatched:
        """All-gather tokens, expert ids and weights; keep the rows of this rank's experts, sorted by expert."""
        blocks = self.blocks
        ids_Ak = all_gather_async(routing.expert_ids_Tk, 0, blocks.axis).wait() - blocks.first
        x_AH = apply_function(_AllGatherTokens, x_TH, blocks.axis)
        weights_Ak = apply_function(_AllGatherTokens, routing.weights_Tk, blocks.axis)
        is_local = (ids_Ak >= 0) & (ids_Ak < blocks.num_local)
        permutation, counts_L = sort_by_expert(ids_Ak.where(is_local, blocks.num_local), blocks.num_local)
        ((rows,),) = self.row_counts(counts_L.sum().view(1, 1), ids_Ak.numel() // blocks.ep)
        permutation = keep_rows(permutation, rows)
        offsets_L = counts_L.cumsum(0).to(torch.int32)
        return Dispatched(permute(x_AH, permutation)[:rows], offsets_L, (permutation, weights_Ak))

    def combine(self, y_RH: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum this rank's rows per token, then the ranks' sums; each rank gets those of its own tokens."""
        permutation, weights_Ak = dispatched.state
        y_AH = unpermute(F.pad(y_RH, (0, 0, 0, 1)), permutation, weights_Ak)
        return apply_function(_ReduceScatterTokens, y_AH, self.blocks.axis)


@dataclass(frozen=True)
class _Exchange:
    """One all-to-all of rows and the way back.

    Attributes:
        sent: Rows from here to each rank.
        received: Rows from each rank to here.
        order_R: The order of received rows by expert.
        arrival_R: Its inverse.
    """

    axis: Axis
    sent: list[int]
    received: list[int]
    order_R: Tensor
    arrival_R: Tensor

    @classmethod
    def build(cls, axis: Axis, sent: list[int], received: list[int], received_NL: Tensor) -> _Exchange:
        """Derive the order from the rows received from each rank for each expert."""
        ranks, experts = received_NL.shape
        expert_ids = torch.arange(experts, device=received_NL.device).repeat(ranks)
        expert_of_row = expert_ids.repeat_interleave(received_NL.flatten(), output_size=sum(received))
        order = torch.argsort(expert_of_row, stable=True)
        arrival = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        return cls(axis, sent, received, order, arrival)

    def send(self, rows: Tensor) -> Tensor:
        """Send rows, in the order of ranks; return the received ones in the order of this rank's experts."""
        return all_to_all_v_async(rows, self.sent, self.received, self.axis).wait().index_select(0, self.order_R)

    def give_back(self, rows_RH: Tensor) -> Tensor:
        """Return rows, in the order of this rank's experts, to where they came from."""
        rows = rows_RH.index_select(0, self.arrival_R)
        return all_to_all_v_async(rows, self.received, self.sent, self.axis).wait()


class _SendRows(torch.autograd.Function):
    """Forward: send rows to the ranks of their experts. Backward: return their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.give_back(gradients[0]), None


class _ReturnRows(torch.autograd.Function):
    """Forward: return rows to the ranks of their tokens. Backward: send their gradients."""

    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.give_back(rows_RH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.send(gradients[0]), None


class _AllGatherTokens(torch.autograd.Function):
    """Forward: all-gather along tokens. Backward: reduce-scatter, as every rank used some of each token's values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather_async(x, 0, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_async(gradients[0], 0, ctx.axis).wait(), None


class _ReduceScatterTokens(torch.autograd.Function):
    """Forward: sum over ranks, and keep this rank's tokens. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter_async(y, 0, axis).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather_async(gradients[0], 0, ctx.axis).wait(), None


def shard_expert_params(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Replace each parameter of routed experts, on meta, by a DTensor over ep and etp."""
    if mesh is None:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (layout := get_param_layout(module, name)).expert:
                module.register_parameter(name, shard_expert_param(parameter, layout, mesh))
