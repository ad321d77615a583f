"""Dynamic context parallelism: documents are partitioned over cp by length (document_partition.py).

Whole documents need no communication. Keys and values of split documents are sent only to the ranks that need them, by
one uneven all-to-all a layer in forward and one in backward. Let kv_r be the keys and values of this rank's tokens, and
kv_w the part of kv_r that belongs to whole documents; q_w and q_s are the queries of whole and of split documents.

Forward:   start kv_in = all_to_all(kv_r[sent]);  out_w = attention(q_w, kv_w), which overlaps with it;
           wait;  out_s = attention(q_s, [kv_r, kv_in][keys])
Backward:  gradients of out_s;  start d_back = all_to_all(dkv_in), which overlaps with the gradients of out_w;
           wait;  dkv_r += d_back, added at the indices `sent`

Shapes as in model/attention/core.py, F: head dim of values; c = B s: this rank's tokens with its rows concatenated, R:
tokens received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.autograd import apply_function
from megalaunch.engine.collectives import AsyncCollective, all_to_all_v_async
from megalaunch.engine.mesh import Axis
from megalaunch.engine.model.attention.documents import DocumentLengths, document_lengths
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.model.dropout import TokenPlaces
from megalaunch.engine.parallel.document_attention import DocumentAttention, document_attention
from megalaunch.engine.parallel.document_partition import (
    DocumentPartition,
    KVExchangePlan,
    make_exchange_plan,
    partition_documents,
)
from megalaunch.engine.platform.host_copy import copy_to_device
from megalaunch.plan.attention_choice import TakenBackends


def local_token_indices(documents_BS: Tensor, axis: Axis, lengths: DocumentLengths = document_lengths) -> Tensor:
    """Return the indices of this rank's tokens in the microbatch whose rows are concatenated, [B, s]."""
    own = partition_documents(lengths(documents_BS), axis.size).local_token_indices(axis.rank)
    return torch.from_numpy(own).view(len(documents_BS), -1)


@dataclass(frozen=True)
class DynamicContextParallel:
    """Dynamic context parallelism of one rank (`ContextParallelism`).

    Every rank gets the document ids of whole samples and computes the same partition from them. `lengths` reads them;
    fake tensors need another function. `backends` are the kernels of attention, `drops` says whether its weights
    are dropped.
    """

    axis: Axis
    lengths: DocumentLengths = document_lengths
    backends: TakenBackends = TakenBackends()
    drops: bool = False

    def position_ids(self, num_tokens: int, device: torch.device) -> Tensor:
        """Raise ValueError: the position ids depend on the documents and come with the batch."""
        raise ValueError("dynamic context parallelism needs position ids in the batch")

    def token_places(self, num_tokens: int, documents_Bs: Tensor | None, device: torch.device) -> TokenPlaces:
        """Return the sample and the position there of each token; a row has tokens of several samples."""
        if documents_Bs is None:
            raise ValueError("dynamic context parallelism needs document ids in the batch")
        tokens = copy_to_device(local_token_indices(documents_Bs, self.axis, self.lengths), device)
        length = documents_Bs.shape[1]
        return TokenPlaces(tokens % length, tokens // length)

    def make_attention(
        self, num_tokens: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[AttentionFn]:
        """Return the attention function of each layer; layers of equal window share one.

        Unlike in the other forms of context parallelism, `documents_Bs` are the ids of whole samples, [B, S].
        """
        if documents_Bs is None:
            raise ValueError("dynamic context parallelism needs document ids in the batch")
        partition = partition_documents(self.lengths(documents_Bs), self.axis.size)
        plan = make_exchange_plan(partition, self.axis.rank)
        dropped_length = documents_Bs.shape[1] if self.drops else None
        made = {
            window: _attention(
                document_attention(
                    partition, plan, self.axis.rank, window, self.backends.of(window), device, dropped_length
                ),
                partition,
                plan,
                self.axis,
                device,
            )
            for window in set(windows)
        }
        return [made[window] for window in windows]


def _attention(
    documents: DocumentAttention,
    partition: DocumentPartition,
    plan: KVExchangePlan,
    axis: Axis,
    device: torch.device,
) -> AttentionFn:
    send_indices = copy_to_device(torch.from_numpy(plan.send_indices), device)

    def attend(q_BNsD: Tensor, k_BGsD: Tensor, v_BGsF: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        q, k, v = (_flatten_batch(x) for x in (q_BNsD, k_BGsD, v_BGsF))
        if partition.has_split_documents:
            kv_exchange = _KVExchange(plan, axis, send_indices)
            placeholder = apply_function(_StartKVExchange, k, v, kv_exchange)
            # Between start and finish, so that the all-to-all overlaps with it; autograd runs the reverse order.
            out = documents.attend_full(q, k, v, scoring)
            received = apply_function(_FinishKVExchange, placeholder, kv_exchange)
            received_k, received_v = torch.split_with_sizes(received, (k.shape[-1], v.shape[-1]), dim=-1)
            out += documents.attend_split(q, torch.cat((k, received_k), 1), torch.cat((v, received_v), 1), scoring)
            # An empty slice: it keeps `received` in the graph of a rank that received no keys, which must still enter
            # the all-to-all of the backward pass.
            out.append(received_v[:, :0].repeat_interleave(len(q) // len(k), dim=0))
        else:
            out = documents.attend_full(q, k, v, scoring)
        out_NcF = torch.cat(out, dim=1)
        return out_NcF.view(len(out_NcF), len(q_BNsD), -1, out_NcF.shape[2]).transpose(0, 1)

    return attend


def _flatten_batch(x_BNsD: Tensor) -> Tensor:
    """[B, N, s, D] -> [N, c, D]."""
    return x_BNsD.transpose(0, 1).flatten(1, 2)


class _KVExchange:
    """The all-to-all in flight of one layer: of keys and values in forward, of their gradients in backward."""

    def __init__(self, plan: KVExchangePlan, axis: Axis, send_indices: Tensor) -> None:
        self.plan, self.axis, self.send_indices = plan, axis, send_indices
        self.pending: AsyncCollective | None = None

    def wait(self) -> Tensor:
        """Wait for the all-to-all that was started last and return its result."""
        assert self.pending is not None, "nothing was sent"
        received, self.pending = self.pending.wait(), None
        return received


class _StartKVExchange(torch.autograd.Function):
    """Start the all-to-all of k [G, c, D] and v [G, c, F]; backward: wait for the gradients and add them to the local.

    The result [G, R, D + F] is a placeholder whose values are never read: it links this node of the autograd graph to
    `_FinishKVExchange`.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.kv_exchange, ctx.widths, ctx.shape = kv_exchange, (k.shape[2], v.shape[2]), k.shape[:2]
        plan = kv_exchange.plan
        packed = torch.cat([x.index_select(1, kv_exchange.send_indices) for x in (k, v)], dim=-1).transpose(0, 1)
        kv_exchange.pending = all_to_all_v_async(packed, plan.input_splits, plan.output_splits, kv_exchange.axis)
        return k.new_empty(len(k), sum(plan.output_splits), sum(ctx.widths))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        kv_exchange: _KVExchange = ctx.kv_exchange
        found, splits = kv_exchange.wait(), list(kv_exchange.plan.input_splits)
        total = torch.zeros(*ctx.shape, sum(ctx.widths), dtype=torch.float32, device=found.device)
        # One index_add per rank: a rank receives a token at most once, so the order of the sums is deterministic.
        by_rank = zip(torch.split(kv_exchange.send_indices, splits), torch.split(found, splits), strict=True)
        for indices, part in by_rank:
            total.index_add_(1, indices, part.transpose(0, 1).float())
        dk, dv = torch.split_with_sizes(total.to(found.dtype), ctx.widths, dim=-1)
        return dk, dv, None


class _FinishKVExchange(torch.autograd.Function):
    """Wait for the keys and values, [G, R, D + F]; backward: start the all-to-all of their gradients.

    The gradient that backward returns is a placeholder: `_StartKVExchange` reads the received gradients instead.
    """

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, kv_exchange: _KVExchange) -> Tensor:
        ctx.kv_exchange = kv_exchange
        return kv_exchange.wait().transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        kv_exchange: _KVExchange = ctx.kv_exchange
        packed = gradients[0].transpose(0, 1)
        kv_exchange.pending = all_to_all_v_async(
            packed, kv_exchange.plan.output_splits, kv_exchange.plan.input_splits, kv_exchange.axis
        )
        return gradients[0], None
