"""Core attention by a kernel of another package, or by torch's of packed documents, called on whole runs of queries.

A call computes contiguous queries over the keys up to the last of them, under a causal mask that is aligned to the last
query and key. It serves whole samples, and after an all-gather each of the two chunks of a context-parallel rank.
Packed documents are one call over all of their pieces, whose lengths it is given.

Shapes: B batch, N query heads, G key/value groups, S queries, T keys, D head dim of queries and keys, F of values, s
queries and t keys of all pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.attention.block_mask import Runs
from megalaunch.engine.model.attention.score_mod import DEFAULT_SCORE_MOD, AttentionFn, ScoreMod
from megalaunch.engine.platform.host_copy import copy_to_device
from megalaunch.kernels.forms import kernel_forms

_ALIGNMENT = 8  # flash attention takes head dims that it divides


class UnknownPackage(RuntimeError):
    """The installed package cannot be imported, or lacks functions or arguments that are called."""


@dataclass(frozen=True)
class Pieces:
    """The lengths of the pieces of documents: of their queries, and of the keys up to the last query of each."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    device: torch.device

    @cached_property
    def cumulative_queries(self) -> Tensor:
        """Where the pieces begin and end among all queries, int32 [pieces + 1]."""
        return self._cumulative(self.queries)

    @cached_property
    def cumulative_keys(self) -> Tensor:
        """Where the pieces begin and end among all keys, int32 [pieces + 1]."""
        return self.cumulative_queries if self.keys == self.queries else self._cumulative(self.keys)

    def _cumulative(self, lengths: tuple[int, ...]) -> Tensor:
        if len(set(lengths)) == 1:  # whole samples: a captured graph reads no host memory, which is freed by its replay
            return torch.arange(len(lengths) + 1, dtype=torch.int32, device=self.device) * lengths[0]
        return copy_to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), self.device)


class PackageKernel(Protocol):
    """The attention of a package, as these files call it."""

    @property
    def description(self) -> str:
        """The package, its version, and which of its kernels."""

    def attend(self, q_BSND: Tensor, k_BTGD: Tensor, v_BTGF: Tensor, window: int | None, scoring: ScoreMod) -> Tensor:
        """Attend with the last S of T positions, [B, S, N, F]. `window`: the sliding window in tokens; None: none."""

    def attend_pieces(
        self, q_sND: Tensor, k_tGD: Tensor, v_tGF: Tensor, pieces: Pieces, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Attend within each piece, with the last queries of its keys, [s, N, F]."""


def package_attention(
    load: Callable[[], PackageKernel],
    queries: Runs,
    documents: Sequence[tuple[int, ...]] | None,
    window: int | None,
) -> AttentionFn:
    """Return causal attention of some tokens over all tokens of their samples.

    Args:
        load: Returns the kernel; not called in a simulation, which prescribes a form.
        queries: The queries' position ids; those of the keys are 0, 1, ...
        documents: The lengths of the documents of each sample; None: one document.
        window: The sliding window in tokens; None: full attention.
    """
    runs = [_Run(run, documents) for run in queries]

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        kernel = _prescribed_or(load)
        q_BSND, k_BTGD, v_BTGF = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        parts = torch.split_with_sizes(q_BSND, [len(run.positions) for run in runs], dim=1)
        outputs = [
            run.attend(kernel, part, k_BTGD, v_BTGF, window, scoring) for run, part in zip(runs, parts, strict=True)
        ]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).transpose(1, 2)

    return attend


def pieces_attention(
    load: Callable[[], PackageKernel], queries: tuple[int, ...], keys: tuple[int, ...], window: int | None
) -> AttentionFn:
    """Return causal attention within pieces of documents, which follow each other in one row.

    Args:
        load: Returns the kernel; not called in a simulation, which prescribes a form.
        queries: The queries of each piece, the last ones of its keys.
        keys: The keys of each piece.
        window: The sliding window in tokens; None: full attention.
    """
    made: list[Pieces] = []  # one for all layers with this window

    def attend(q: Tensor, k: Tensor, v: Tensor, scoring: ScoreMod = DEFAULT_SCORE_MOD, /) -> Tensor:
        if not made:
            made.append(Pieces(queries, keys, q.device))
        q_sND, k_tGD, v_tGF = (x[0].transpose(0, 1) for x in (q, k, v))
        out_sNF = _prescribed_or(load).attend_pieces(q_sND, k_tGD, v_tGF, made[0], window, scoring)
        return out_sNF.transpose(0, 1)[None]

    return attend


def _prescribed_or(load: Callable[[], PackageKernel]) -> PackageKernel:
    """Return the kernel, or the form that a simulation prescribes in its place."""
    form = kernel_forms().attention
    return load() if form is None else _PrescribedKernel(form)


@dataclass(frozen=True)
class _PrescribedKernel:
    """The form that a simulation prescribes, called as a package's kernel is."""

    form: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    description = "simulated"

    def attend(self, q_BSND: Tensor, k_BTGD: Tensor, v_BTGF: Tensor, window: int | None, scoring: ScoreMod) -> Tensor:
        """Allocate what a call on whole rows does."""
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BTGD, v_BTGF))
        return self.form(q, k, v, None).transpose(1, 2)

    def attend_pieces(
        self, q_sND: Tensor, k_tGD: Tensor, v_tGF: Tensor, pieces: Pieces, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Allocate what a call on pieces does: as much as on one row of as many tokens."""
        return self.attend(q_sND[None], k_tGD[None], v_tGF[None], window, scoring)[0]


class _Run:
    """Contiguous queries of every sample, and the pieces of documents among them."""

    def __init__(self, positions: range, documents: Sequence[tuple[int, ...]] | None) -> None:
        self.positions = positions
        self._pieces: Pieces | None = None
        self._rows = None if documents is None else [_cut(lengths, positions) for lengths in documents]

    def attend(
        self, kernel: PackageKernel, q: Tensor, k: Tensor, v: Tensor, window: int | None, scoring: ScoreMod
    ) -> Tensor:
        """Attend with the run's queries [B, S, N, D] to keys [B, T, G, D] and values [B, T, G, F] -> [B, S, N, F]."""
        stop = self.positions.stop
        if self._rows is None:
            return kernel.attend(q, k[:, :stop], v[:, :stop], window, scoring)
        if self._pieces is None:  # one for all layers with this window
            queries, keys = (tuple(x for row in self._rows for x in row[side]) for side in (0, 1))
            self._pieces = Pieces(queries, keys, q.device)
        k_tGD, v_tGF = (_of_pieces(x, stop, [sum(keys) for _, keys in self._rows]) for x in (k, v))
        return kernel.attend_pieces(q.flatten(0, 1), k_tGD, v_tGF, self._pieces, window, scoring).view(
            *q.shape[:-1], v.shape[-1]
        )


def _of_pieces(x_BTGD: Tensor, stop: int, counts: Sequence[int]) -> Tensor:
    """Return the last so many keys or values before `stop` of each row, [t, G, D]: of whole samples no copy."""
    if all(count == x_BTGD.shape[1] for count in counts):
        return x_BTGD.flatten(0, 1)
    return torch.cat([row[stop - count : stop] for row, count in zip(x_BTGD, counts, strict=True)])


def _cut(lengths: tuple[int, ...], run: range) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of a sample's documents in a run of queries: of queries, and of keys up to the last query."""
    queries, keys = [], []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        first, stop = max(run.start, end - length), min(run.stop, end)
        if first < stop:
            queries.append(stop - first)
            keys.append(stop - (end - length))
    return tuple(queries), tuple(keys)


def one_width(*inputs: Tensor) -> list[Tensor]:
    """Return queries, keys and values of one head dim that flash attention takes, padded with zeros."""
    width = max(x.shape[-1] for x in inputs)
    width += -width % _ALIGNMENT
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in inputs]


def require_plain_scores(scoring: ScoreMod, backend: str, soft_cap: bool) -> None:
    """Raise ValueError for a score modification that a package does not compute; it has a soft cap or none."""
    unmet = {
        "soft cap": scoring.soft_cap is not None and not soft_cap,
        "sinks": scoring.sinks is not None,
        "dropout of this engine": scoring.dropout_seeds is not None,
    }
    if any(unmet.values()):
        named = " and ".join(name for name, missing in unmet.items() if missing)
        raise ValueError(f"attention_backend={backend} computes no {named}: use auto")
