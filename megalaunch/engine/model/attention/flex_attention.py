"""Attention by torch's FlexAttention: a kernel that is generated from the mask and the score modification.

Blocks of the mask without a visible pair are skipped. FlexAttention is compiled on CUDA; on a CPU torch runs it
operator by operator, without a backward pass. Sinks join the softmax through its log-sum-exp.

Dropout of weights takes two calls, as a score modification changes the sum of the weights too. With L the log-sum-exp
of all scores, and out' and L' those of a call that sees the kept ones only:  out = exp(L' - L) / (1 - rate) out'

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from megalaunch.engine.model.attention.block_mask import Runs, positions_of
from megalaunch.engine.model.attention.score_mod import (
    DEFAULT_SCORE_MOD,
    AttentionFn,
    ScoreMod,
    softcap,
)
from megalaunch.engine.model.dropout import hash_ids, keeps, mix_hash
from megalaunch.kernels.flex_attention import flex_operator, make_flex_mask
from megalaunch.kernels.forms import kernel_forms

_LEAST_WIDTH = 16  # of heads: values of a call whose output is not used

_ScoreModFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DocumentTokens:
    """Tokens in memory order: the document of each, its position there, and its index in the microbatch, int64 [s]."""

    documents: Tensor
    positions: Tensor
    indices: Tensor


@dataclass(frozen=True)
class _Places:
    """Where tokens are in their samples, hashed: the positions of queries, [S], and of keys, [T].

    `rows` is the sample of each query of a batch of one row, [S]; None: that of its row.
    """

    queries: Tensor
    keys: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, q_positions: Tensor, k_positions: Tensor, rows: Tensor | None = None) -> _Places:
        return cls(hash_ids(q_positions), hash_ids(k_positions), rows)

    def hashes(self, seeds_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hashes of queries, int32 [B, N, S], and keys, [T]: `keeps` of both says which weights are kept."""
        seeds = seeds_BN[..., None] if self.rows is None else seeds_BN[self.rows].mT[None]
        return mix_hash(seeds, self.queries), self.keys


class FlexMask:
    """The causal mask of some tokens over others, within documents and a sliding window.

    Its block mask is made at the first call, for all layers that share it; a captured graph of a layer reads it, too.
    So are the places of tokens, at the first call with dropout.
    """

    def __init__(
        self, make: Callable[[torch.device], BlockMask], make_places: Callable[[torch.device], _Places]
    ) -> None:
        """Take what makes the block mask, and the places of its tokens, on a device."""
        self._make, self._make_places = make, make_places
        self._made: BlockMask | None = None
        self._places: _Places | None = None

    @classmethod
    def by_position(cls, queries: Runs, keys: Runs, documents_BS: Tensor | None, window: int | None) -> FlexMask:
        """Return the mask of whole samples' tokens.

        Args:
            queries: The queries' position ids.
            keys: The keys' position ids.
            documents_BS: Document ids by position; None: one document.
            window: The sliding window in tokens; None: full attention.
        """
        make = partial(_block_mask, queries, keys, documents_BS, window)
        return cls(make, lambda device: _Places.of(positions_of(queries, device), positions_of(keys, device)))

    @classmethod
    def by_token(
        cls, queries: DocumentTokens, keys: DocumentTokens, window: int | None, sample_length: int | None = None
    ) -> FlexMask:
        """Return the mask of tokens in any order; queries of a document that no key is of see nothing.

        `sample_length` is the number of tokens of a sample, needed for dropout only.
        """

        def places(device: torch.device) -> _Places:
            assert sample_length is not None, "dropout needs the places of tokens in their samples"
            rows = queries.indices.div(sample_length, rounding_mode="floor")
            return _Places.of(queries.indices % sample_length, keys.indices % sample_length, rows)

        return cls(partial(_token_block_mask, queries, keys, window), places)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod) -> tuple[Tensor, Tensor]:
        """Return attention without sinks and the log-sum-exp of scores, fp32 [B, N, S], -inf where no key is seen."""
        if scoring.dropout_seeds is None:
            return self._call(q, k, v, scoring)
        _, log_sum = self._call(q, k, v[..., :_LEAST_WIDTH].detach(), scoring)
        kept, kept_log_sum = self._call(q, k, v, scoring, self._dropout_hashes(scoring.dropout_seeds))
        difference = torch.where(log_sum == -torch.inf, 0.0, kept_log_sum - log_sum)  # queries that see no key
        share = difference.exp() * (1 / (1 - scoring.dropout))
        return (kept * share.unsqueeze(-1)).to(kept.dtype), log_sum

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod, hashes: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Call FlexAttention; with hashes of queries and keys it sees the scores that dropout keeps."""
        form = kernel_forms().flex_attention
        if form is not None:
            return form(q, k, v, hashes or ())
        if self._made is None:
            self._made = self._make(q.device)
        score_mod = None if scoring.soft_cap is None else _capped(scoring.soft_cap)
        if hashes is not None:
            score_mod = _dropped(*hashes, scoring.dropout, score_mod)
        return _attend(q, k, v, self._made, scoring.softmax_scale(q), score_mod)

    def _dropout_hashes(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        if self._places is None:
            self._places = self._make_places(seeds.device)
        return self._places.hashes(seeds)


def flex_attention_by_position(
    queries: Runs, keys: Runs, documents_BS: Tensor | None, window: int | None
) -> AttentionFn:
    """Return attention over all keys that the queries see; arguments as of `FlexMask.by_position`."""
    return flex_attention_of(FlexMask.by_position(queries, keys, documents_BS, window))


def flex_attention_of(mask: FlexMask) -> AttentionFn:
    """Return attention over the keys that the mask shows."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        out, log_sum = mask.attend(q, k, v, scoring)
        return out if scoring.sinks is None else _with_sinks(out, log_sum, scoring.sinks)

    return attend


def _with_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the output with sinks: with the log-sum-exp L a sink s multiplies it by exp(L) / (exp(L) + exp(s))."""
    kept = torch.sigmoid(log_sum - sinks.float()[:, None])
    return (out * kept.unsqueeze(-1)).to(out.dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, scale: float, score_mod: _ScoreModFn | None
) -> tuple[Tensor, Tensor]:
    """Call FlexAttention; return its output, [B, N, S, D], and the log-sum-exp of scores, fp32 [B, N, S]."""
    out, aux = flex_operator(q)(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@cache
def _capped(cap: float) -> _ScoreModFn:
    """Return the soft cap as a score modification; one function per cap, so that it is compiled once."""

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap(score, cap)

    return score_mod


def _dropped(q_hashes: Tensor, k_hashes: Tensor, rate: float, modified: _ScoreModFn | None) -> _ScoreModFn:
    """Return the score modification that hides the scores that dropout drops, and modifies the others."""

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = keeps(q_hashes[batch, head, query], k_hashes[key], rate)
        return torch.where(kept, score if modified is None else modified(score, batch, head, query, key), -torch.inf)

    return score_mod


def _block_mask(
    queries: Runs, keys: Runs, documents_BS: Tensor | None, window: int | None, device: torch.device
) -> BlockMask:
    if documents_BS is None:
        return _causal_block_mask(queries, keys, window, device)
    return _document_block_mask(queries, keys, documents_BS, window)


@lru_cache(maxsize=256)  # a ring has one for the keys of each rank
def _causal_block_mask(queries: Runs, keys: Runs, window: int | None, device: torch.device) -> BlockMask:
    """Return the block mask of one document per sample."""
    q_positions, k_positions = positions_of(queries, device), positions_of(keys, device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _in_window(q_positions[query] - k_positions[key], window)

    return make_flex_mask(visible, None, len(q_positions), len(k_positions), device)


def _document_block_mask(queries: Runs, keys: Runs, documents_BS: Tensor, window: int | None) -> BlockMask:
    """Return the block mask of a microbatch of packed documents."""
    device = documents_BS.device
    q_positions, k_positions = positions_of(queries, device), positions_of(keys, device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents_BS[batch, q_positions[query]] == documents_BS[batch, k_positions[key]]
        return _in_window(q_positions[query] - k_positions[key], window) & same

    return make_flex_mask(visible, len(documents_BS), len(q_positions), len(k_positions), device)


def _token_block_mask(
    queries: DocumentTokens, keys: DocumentTokens, window: int | None, device: torch.device
) -> BlockMask:
    """Return the block mask of tokens in any order."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = queries.documents[query] == keys.documents[key]
        return _in_window(queries.positions[query] - keys.positions[key], window) & same

    return make_flex_mask(visible, None, len(queries.documents), len(keys.documents), device)


def _in_window(distance: Tensor, window: int | None) -> Tensor:
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)
