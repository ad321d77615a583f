"""Which part of every sample a rank holds, and how its queries reach the keys: the one-device form.

Shapes: B batch, N query heads, G key/value groups, S all tokens of a sample, s those of this rank, T keys at hand,
D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megalaunch.engine.model.blocks import weigh
from megalaunch.engine.model.processor_attention import blocks_pay, causal_on_processor
from megalaunch.engine.model.scores import PLAIN, Scoring
from megalaunch.engine.model.sight import Sight, sight_of


class Attend(Protocol):
    """What lies between the projections."""

    def __call__(self, q_BNsD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: Scoring = PLAIN, /) -> Tensor:
        """Queries [B, N, s, D], keys and values [B, G, T, D] -> [B, N, s, D]."""


class Context(Protocol):
    """A sample's tokens as they lie over ranks."""

    def places(self, held: int, device: torch.device) -> Tensor:
        """Where the `held` tokens of this rank stand in their sample, [s] int64."""

    def attention(
        self, held: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[Attend]:
        """Causal attention of layers with these windows (None: all tokens), within documents where they are given.

        `device`: where queries, keys and `documents_Bs` lie, so that masks and places are made there.
        """


class WholeSample:
    """Every rank holds all tokens of its samples."""

    def places(self, held: int, device: torch.device) -> Tensor:
        """0, 1, ..."""
        return torch.arange(held, device=device)

    def attention(
        self, held: int, documents_Bs: Tensor | None, windows: Sequence[int | None], device: torch.device
    ) -> Sequence[Attend]:
        """One for each window, shared by its layers."""
        made = {window: self._attend(held, documents_Bs, window, device) for window in set(windows)}
        return [made[window] for window in windows]

    def _attend(self, held: int, documents_Bs: Tensor | None, window: int | None, device: torch.device) -> Attend:
        if documents_Bs is None:
            return partial(causal, window=window)
        places = self.places(held, device)
        return seen(sight_of(places, places, documents_Bs, documents_Bs, window))


WHOLE_SAMPLE = WholeSample()


def causal(
    q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: Scoring = PLAIN, /, window: int | None = None
) -> Tensor:
    """Attention of the last S of T positions over all T, or the last `window` of them: [B, N, S, D]."""
    if window is not None and q_BNSD.shape[2] == 1:
        k_BGTD, v_BGTD, window = k_BGTD[:, :, -window:], v_BGTD[:, :, -window:], None
    queries, keys = q_BNSD.shape[2], k_BGTD.shape[2]
    if queries in (1, keys) and scoring.plain and (window is None or window >= keys):
        if blocks_pay(q_BNSD):
            return causal_on_processor(q_BNSD, k_BGTD, v_BGTD, scoring.scaling(q_BNSD))
        grouped = q_BNSD.shape[1] != k_BGTD.shape[1]
        return F.scaled_dot_product_attention(
            q_BNSD, k_BGTD, v_BGTD, is_causal=queries > 1, scale=scoring.scale, enable_gqa=grouped
        )
    places = torch.arange(keys, device=q_BNSD.device)
    sight = Sight(places[keys - queries :], places, window=window)
    return weigh(q_BNSD, k_BGTD, v_BGTD, sight, scoring)


def seen(sight: Sight) -> Attend:
    """Attention over the keys that a sight shows, on the device where it was made."""

    def attend(q_BNSD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, scoring: Scoring = PLAIN, /) -> Tensor:
        return weigh(q_BNSD, k_BGTD, v_BGTD, sight, scoring)

    return attend
