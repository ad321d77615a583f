"""Attention of the documents of one rank under dynamic context parallelism, by the backend that a run takes.

A rank computes its full documents from its own keys and values, and its chunks of split documents from these and the
received ones. Kernels of documents by their lengths compute each of the two in one call; blocks, one call of the full
documents and one of each chunk; FlexAttention, two calls that have the same shape in every microbatch.

Shapes: N query heads, G key/value groups, c this rank's tokens with its rows concatenated, t these and the received
ones, D head dim of queries and keys, F of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megalaunch.engine.model.attention.backends import RUN_KERNELS
from megalaunch.engine.model.attention.block_attention import blockwise_attention
from megalaunch.engine.model.attention.block_kernels import BlockBackend
from megalaunch.engine.model.attention.block_mask import make_block_mask
from megalaunch.engine.model.attention.core import causal_attention, masked_attention
from megalaunch.engine.model.attention.flex_attention import DocumentTokens, FlexMask, flex_attention_of
from megalaunch.engine.model.attention.mask import make_mask
from megalaunch.engine.model.attention.package_attention import pieces_attention
from megalaunch.engine.model.attention.score_mod import AttentionFn, ScoreMod
from megalaunch.engine.parallel.document_partition import DocumentChunk, DocumentPartition, Flat, KVExchangePlan
from megalaunch.engine.platform.host_copy import copy_to_device
from megalaunch.plan.attention_choice import TakenBackend

# Whole documents of together at most this many tokens share one masked attention call: launching a call for fewer
# tokens takes longer than its computation.
_BUNDLE = 256
_NO_DOCUMENT, _OTHER_DOCUMENT = -1, -2  # of keys that are padding, and of queries of the other call


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a rank: numbers of queries and keys, and the function.

    `row` is the sample in the microbatch whose dropout masks the weights have; None: none are dropped.
    """

    queries: int
    keys: int
    attend: AttentionFn
    row: int | None = None


AttentionCalls = Sequence[AttentionCall]


class DocumentAttention(Protocol):
    """Attention of the documents of one rank; outputs are those of consecutive tokens, [N, ., F] each."""

    def attend_full(self, q_NcD: Tensor, k_GcD: Tensor, v_GcF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of full documents, the rank's first tokens."""

    def attend_split(self, q_NcD: Tensor, k_GtD: Tensor, v_GtF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of the other tokens."""


def document_attention(
    partition: DocumentPartition,
    plan: KVExchangePlan,
    rank: int,
    window: int | None,
    backend: TakenBackend,
    device: torch.device,
    dropped_length: int | None = None,
) -> DocumentAttention:
    """Return attention of a rank's documents by a backend.

    `dropped_length` is the number of tokens of a sample if attention weights are dropped; None: they are not.
    """
    if backend == "flex":
        return _FlexCalls.of(partition, plan, rank, window, device, dropped_length)
    chunks = partition.ranks[rank]
    full = [chunk for chunk in chunks if partition.is_full_document(chunk)]
    split = [chunk for chunk in chunks if not partition.is_full_document(chunk)]
    if backend in RUN_KERNELS:
        of_pieces = partial(_call_of_pieces, backend, window)
        return _Calls(plan, of_pieces(full), of_pieces(split), device)
    if backend not in ("auto", "flash", "math"):
        raise ValueError(f"attention_backend={backend} does not work with dynamic context parallelism")
    if dropped_length is not None:
        dropped = partial(_dropped_call, partition, dropped_length, window, backend)
        return _Calls(plan, list(map(dropped, full)), list(map(dropped, split)), device)
    lengths = tuple(chunk.num_tokens for chunk in full)
    if backend == "auto":
        calls = [_chunk_call(chunk, window) for chunk in split]
        return _Calls(plan, _selected_calls(lengths, window, device), calls, device)
    calls = [_block_chunk(chunk, window, backend) for chunk in split]
    return _Calls(plan, _block_call(lengths, window, backend), calls, device)


class _Calls:
    """Calls on consecutive queries, each with keys of its own, in the order of documents."""

    def __init__(self, plan: KVExchangePlan, full: AttentionCalls, split: AttentionCalls, device: torch.device) -> None:
        self._full_tokens, self._full, self._split = plan.full_document_tokens, full, split
        self._key_indices = _on_device(plan.key_indices, device)

    def attend_full(self, q_NcD: Tensor, k_GcD: Tensor, v_GcF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of full documents, the rank's first tokens."""
        q, k, v = (x[:, : self._full_tokens] for x in (q_NcD, k_GcD, v_GcF))
        return _run_calls(self._full, q, k, v, scoring)

    def attend_split(self, q_NcD: Tensor, k_GtD: Tensor, v_GtF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of the other tokens."""
        if not self._split:
            return []
        keys, values = (x.index_select(1, self._key_indices) for x in (k_GtD, v_GtF))
        return _run_calls(self._split, q_NcD[:, self._full_tokens :], keys, values, scoring)


def _run_calls(calls: AttentionCalls, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod) -> list[Tensor]:
    """Run the attention calls; return the output of each, [N, ., F]."""
    if not calls:
        return []
    queries = torch.split(q, [call.queries for call in calls], dim=1)
    keys, values = (torch.split(x, [call.keys for call in calls], dim=1) for x in (k, v))
    return [
        call.attend(one_q[None], one_k[None], one_v[None], scoring.of_row(call.row))[0]
        for one_q, one_k, one_v, call in zip(queries, keys, values, calls, strict=True)
    ]


def _selected_calls(lengths: Sequence[int], window: int | None, device: torch.device) -> AttentionCalls:
    """Return one attention call for each long document; short ones share masked calls."""
    made: list[AttentionCall] = []
    for bundle in _group_short_documents(lengths):
        tokens = sum(bundle)
        attend: AttentionFn = partial(causal_attention, window=window)
        if len(bundle) > 1:
            documents = _on_device(np.repeat(np.arange(len(bundle)), bundle), device)[None]
            positions = torch.arange(tokens, device=device)
            attend = masked_attention(make_mask(positions, positions, documents, documents, window))
        made.append(AttentionCall(tokens, tokens, attend))
    return made


def _group_short_documents(lengths: Sequence[int]) -> list[list[int]]:
    """Group neighbouring documents of together at most _BUNDLE tokens."""
    bundles: list[list[int]] = []
    for length in lengths:
        if bundles and sum(bundles[-1]) + length <= _BUNDLE:
            bundles[-1].append(length)
        else:
            bundles.append([length])
    return bundles


def _chunk_call(chunk: DocumentChunk, window: int | None) -> AttentionCall:
    """Return the attention call of a chunk's queries over the keys of its document up to the chunk's end."""
    if chunk.start == 0:
        return AttentionCall(chunk.num_tokens, chunk.stop, partial(causal_attention, window=window))
    return _block_chunk(chunk, window, "auto")


def _block_chunk(chunk: DocumentChunk, window: int | None, kernel: BlockBackend) -> AttentionCall:
    """Return the same call by blocks."""
    mask = make_block_mask((range(chunk.start, chunk.stop),), (range(chunk.stop),), window)
    return AttentionCall(chunk.num_tokens, chunk.stop, blockwise_attention(mask, kernel))


def _dropped_call(
    partition: DocumentPartition, length: int, window: int | None, kernel: BlockBackend, chunk: DocumentChunk
) -> AttentionCall:
    """Return the same call with dropout, by blocks whose positions are those in the sample of `length` tokens."""
    row, first = divmod(int(partition.first[chunk.document]), length)
    queries = range(first + chunk.start, first + chunk.stop)
    mask = make_block_mask((queries,), (range(first, queries.stop),), window)
    return AttentionCall(chunk.num_tokens, chunk.stop, blockwise_attention(mask, kernel), row)


def _block_call(lengths: tuple[int, ...], window: int | None, kernel: BlockBackend) -> AttentionCalls:
    """Return the attention call of full documents by blocks."""
    tokens = (range(sum(lengths)),)
    attend = blockwise_attention(make_block_mask(tokens, tokens, window, (lengths,)), kernel)
    return [AttentionCall(sum(lengths), sum(lengths), attend)] if lengths else []


def _call_of_pieces(backend: TakenBackend, window: int | None, chunks: Sequence[DocumentChunk]) -> AttentionCalls:
    """Return the call of a kernel that takes the lengths of documents."""
    queries, keys = tuple(chunk.num_tokens for chunk in chunks), tuple(chunk.stop for chunk in chunks)
    attend = pieces_attention(RUN_KERNELS[backend], queries, keys, window)
    return [AttentionCall(sum(queries), sum(keys), attend)] if queries else []


@dataclass(frozen=True)
class _FlexCalls:
    """Two calls of FlexAttention on all tokens of the rank, whose shapes are the same in every microbatch.

    It is compiled for each shape, and with too many of them no longer. So both calls have all queries, of which those
    of the other call see nothing and are skipped, and the second one room for the keys of all ranks.

    Attributes:
        full: Attention of full documents, over the rank's own keys; None: the rank has none.
        split: Attention of the other tokens, over the keys of `room` tokens; None: the rank has none.
        full_tokens: The first so many tokens are full documents.
        room: Tokens of all ranks.
    """

    full: AttentionFn | None
    split: AttentionFn | None
    full_tokens: int
    room: int

    @classmethod
    def of(
        cls,
        partition: DocumentPartition,
        plan: KVExchangePlan,
        rank: int,
        window: int | None,
        device: torch.device,
        dropped_length: int | None,
    ) -> _FlexCalls:
        """Make the masks of a rank."""
        own, room = partition.local_token_indices(rank), sum(partition.lengths)
        received = np.concatenate(partition.remote_tokens(rank, partition.owner_of_token()))
        indices = np.concatenate((own, received))
        documents, positions = (x[indices] for x in partition.places_of_tokens())
        count, is_full = len(own), np.arange(len(own)) < plan.full_document_tokens
        padded = (0, room - len(documents))
        keys = (
            np.pad(documents, padded, constant_values=_NO_DOCUMENT),
            *(np.pad(x, padded) for x in (positions, indices)),
        )

        def attention(chosen: NDArray[np.bool_], seen: tuple[Flat, ...]) -> AttentionFn | None:
            queries = np.where(chosen, documents[:count], _OTHER_DOCUMENT), positions[:count], own
            of_queries, of_keys = (DocumentTokens(*(_on_device(x, device) for x in each)) for each in (queries, seen))
            mask = FlexMask.by_token(of_queries, of_keys, window, dropped_length)
            return flex_attention_of(mask) if chosen.any() else None

        own_keys = documents[:count], positions[:count], own
        return cls(attention(is_full, own_keys), attention(~is_full, keys), plan.full_document_tokens, room)

    def attend_full(self, q_NcD: Tensor, k_GcD: Tensor, v_GcF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of full documents, the rank's first tokens."""
        if self.full is None:
            return []
        return [self.full(q_NcD[None], k_GcD[None], v_GcF[None], scoring)[0, :, : self.full_tokens]]

    def attend_split(self, q_NcD: Tensor, k_GtD: Tensor, v_GtF: Tensor, scoring: ScoreMod) -> list[Tensor]:
        """Return the outputs of the other tokens."""
        if self.split is None:
            return []
        missing = self.room - k_GtD.shape[1]
        keys, values = (F.pad(x, (0, 0, 0, missing)) if missing else x for x in (k_GtD, v_GtF))
        return [self.split(q_NcD[None], keys[None], values[None], scoring)[0, :, self.full_tokens :]]


def _on_device(numbers: Flat, device: torch.device) -> Tensor:
    return copy_to_device(torch.from_numpy(numbers), device)
