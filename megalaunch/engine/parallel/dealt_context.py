"""Context parallelism over documents that are dealt out by length (deal.py): keys go only where they are seen.

One uneven all-to-all a layer carries the keys and values of cut documents, beside the attention of whole ones.
Shapes as in model/context.py; c tokens of this rank in one row (c = B s), R tokens whose keys arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalaunch.engine.collectives import Pending, start_uneven_exchange
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.context import Attend, causal, seen
from megalaunch.engine.model.scores import PLAIN, Scoring
from megalaunch.engine.model.sight import sight_of
from megalaunch.engine.parallel.deal import Deal, Flat, Piece, deal

# Whole documents that share one masked product: below this many tokens starting one costs more than it computes.
_BUNDLE = 256

Products = Sequence[tuple[int, int, Attend]]
"""Queries and keys of each product of a rank's attention, one after the other, and how it is computed."""


def run_lengths(documents_BS: Tensor) -> tuple[int, ...]:
    """How long the documents of each row are, row after row: runs of one number."""
    rows = documents_BS.cpu().numpy()
    ends = [np.flatnonzero(np.diff(row, append=row[-1] + 1)) + 1 for row in rows]
    return tuple(int(length) for row in ends for length in np.diff(row, prepend=0))


def tokens_of(documents_BS: Tensor, axis: Axis) -> Tensor:
    """The tokens that this rank holds, [B, s], by their number in the microbatch."""
    own = deal(run_lengths(documents_BS), axis.size).own(axis.rank)
    return torch.from_numpy(own).view(len(documents_BS), -1)


@dataclass(frozen=True)
class Trade:
    """What one rank of a deal does in a layer: numbers of its tokens that are sent, how many to and from each rank.

    Its first `whole` tokens are whole documents; the others see the keys `keys`, by their number among its own tokens
    and those that arrive, after them.
    """

    sent: Flat
    to: tuple[int, ...]
    found: tuple[int, ...]
    whole: int
    keys: Flat


def trade_of(dealt: Deal, rank: int) -> Trade:
    """That of `rank`."""
    own, holders, pieces = dealt.own(rank), dealt.holders(), dealt.ranks[rank]
    found = dealt.wanted(rank, holders)
    number = np.full(len(holders), -1)
    number[own] = np.arange(len(own))
    number[np.concatenate(found)] = len(own) + np.arange(sum(map(len, found)))
    sent = [number[dealt.wanted(other, holders)[rank]] for other in range(len(dealt.ranks))]
    keys = [number[dealt.first[p.document] + np.arange(p.stop)] for p in pieces if not dealt.whole(p)]
    return Trade(
        sent=np.concatenate(sent),
        to=tuple(map(len, sent)),
        found=tuple(map(len, found)),
        whole=sum(p.tokens for p in pieces if dealt.whole(p)),
        keys=np.concatenate((*keys, np.empty(0, np.int64))),
    )


@dataclass(frozen=True)
class DealtContext:
    """The context of one rank; documents are given for all tokens of a sample, and say who holds which."""

    axis: Axis

    def places(self, held: int, device: torch.device) -> Tensor:
        """Not to be known from a number of tokens: raises ValueError."""
        raise ValueError("tokens that are dealt out by length come with their positions")

    def attention(
        self, held: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[Attend]:
        """One function for each window; `documents_Bs` are those of whole samples, [B, S]."""
        if documents_Bs is None:
            raise ValueError("tokens that are dealt out by length come with their documents")
        dealt = deal(run_lengths(documents_Bs), self.axis.size)
        trade = trade_of(dealt, self.axis.rank)
        made = {window: _attention(dealt, trade, self.axis, window, device) for window in set(windows)}
        return [made[window] for window in windows]


def _attention(dealt: Deal, trade: Trade, axis: Axis, window: int | None, device: torch.device) -> Attend:
    pieces = dealt.ranks[axis.rank]
    whole = _products_of_whole([p.tokens for p in pieces if dealt.whole(p)], window, device)
    rest = [_product_of_cut(p, window, device) for p in pieces if not dealt.whole(p)]
    sent, keys = (torch.from_numpy(numbers).to(device) for numbers in (trade.sent, trade.keys))

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsD: Tensor, scoring: Scoring = PLAIN, /) -> Tensor:
        q_NcD, kv_GcD = _in_one_row(q_BNsD), torch.stack((_in_one_row(k_BGsD), _in_one_row(v_BGsD)))
        parts = [trade.whole, q_NcD.shape[1] - trade.whole]
        q_whole, q_cut = torch.split(q_NcD, parts, dim=1)
        out = []
        if dealt.cut:
            trip = _Trip(trade, axis, sent)
            coming: Tensor = _Leave.apply(kv_GcD, trip)  # type: ignore[no-untyped-call]
            out += _computed(q_whole, kv_GcD[:, :, : trade.whole], whole, scoring)
            arrived: Tensor = _Arrive.apply(coming, trip)  # type: ignore[no-untyped-call]
            at_hand = torch.cat((kv_GcD, arrived), dim=2)
            out += _computed(q_cut, at_hand.index_select(2, keys), rest, scoring)
            # Nothing, but a rank that sees no key of others takes part in the backward exchange all the same.
            out.append(arrived[1, :, :0].repeat_interleave(q_NcD.shape[0] // kv_GcD.shape[1], dim=0))
        else:
            out += _computed(q_whole, kv_GcD, whole, scoring)
        out_NcD = torch.cat(out, dim=1)
        return out_NcD.view(len(out_NcD), len(q_BNsD), -1, out_NcD.shape[2]).transpose(0, 1)

    return attend


def _computed(q_NcD: Tensor, kv_GtD: Tensor, products: Products, scoring: Scoring) -> list[Tensor]:
    """Each product's output [N, ., D]."""
    if not products:
        return []
    queries = torch.split(q_NcD, [count for count, _, _ in products], dim=1)
    keys_values = torch.split(kv_GtD, [count for _, count, _ in products], dim=2)
    return [
        attend(q[None], kv[0][None], kv[1][None], scoring)[0]
        for q, kv, (_, _, attend) in zip(queries, keys_values, products, strict=True)
    ]


def _products_of_whole(lengths: Sequence[int], window: int | None, device: torch.device) -> Products:
    """A product for each long document; short ones share products."""
    made: list[tuple[int, int, Attend]] = []
    for bundle in _bundles(lengths):
        tokens = sum(bundle)
        attend: Attend = partial(causal, window=window)
        if len(bundle) > 1:
            numbers = torch.arange(len(bundle), device=device)
            documents = numbers.repeat_interleave(torch.tensor(bundle, device=device))[None]
            places = torch.arange(tokens, device=device)
            attend = seen(sight_of(places, places, documents, documents, window))
        made.append((tokens, tokens, attend))
    return made


def _bundles(lengths: Sequence[int]) -> list[list[int]]:
    """Neighbours of together at most _BUNDLE tokens."""
    bundles: list[list[int]] = []
    for length in lengths:
        if bundles and sum(bundles[-1]) + length <= _BUNDLE:
            bundles[-1].append(length)
        else:
            bundles.append([length])
    return bundles


def _product_of_cut(piece: Piece, window: int | None, device: torch.device) -> tuple[int, int, Attend]:
    """The queries of a piece over all keys of its document up to its end."""
    if piece.start == 0:
        return piece.tokens, piece.stop, partial(causal, window=window)
    places = torch.arange(piece.stop, device=device)
    return piece.tokens, piece.stop, seen(sight_of(places[piece.start :], places, None, None, window))


def _in_one_row(x_BNsD: Tensor) -> Tensor:
    """[B, N, s, D] -> [N, c, D]."""
    return x_BNsD.transpose(0, 1).flatten(1, 2)


class _Trip:
    """One layer's keys and values on their way, and their gradients on the way back."""

    def __init__(self, trade: Trade, axis: Axis, sent: Tensor) -> None:
        self.trade, self.axis, self.sent = trade, axis, sent
        self.pending: Pending | None = None

    def wait(self) -> Tensor:
        """What was on its way last."""
        assert self.pending is not None, "nothing was sent"
        arrived, self.pending = self.pending.wait(), None
        return arrived


class _Leave(torch.autograd.Function):
    """kv [2, G, c, D] -> [2, G, R, D], not to be read before `_Arrive`; backward: the gradients of one's own keys."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, trip: _Trip) -> Tensor:
        ctx.trip, ctx.shape = trip, kv.shape
        trade = trip.trade
        packed = kv.index_select(2, trip.sent).permute(2, 0, 1, 3)
        trip.pending = start_uneven_exchange(packed, trade.to, trade.found, trip.axis)
        return kv.new_empty(*kv.shape[:2], sum(trade.found), kv.shape[3])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        trip: _Trip = ctx.trip
        found, counts = trip.wait(), list(trip.trade.to)
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=found.device)
        # Rank by rank: none wants a token twice, so that sums are made in one order.
        for numbers, part in zip(torch.split(trip.sent, counts), torch.split(found, counts), strict=True):
            total.index_add_(2, numbers, part.permute(1, 2, 0, 3).float())
        return total.to(found.dtype), None


class _Arrive(torch.autograd.Function):
    """What left, [2, G, R, D]; backward: its gradients leave."""

    @staticmethod
    def forward(ctx: Any, coming: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.wait().permute(1, 2, 0, 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        trip: _Trip = ctx.trip
        packed = gradients[0].permute(2, 0, 1, 3)
        trip.pending = start_uneven_exchange(packed, trip.trade.found, trip.trade.to, trip.axis)
        return gradients[0], None
