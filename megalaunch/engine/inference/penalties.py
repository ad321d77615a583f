"""Penalties on tokens that a text already has, and biases of single tokens, as requests to a server set them.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenPenalties:
    """What is added to the logits before sampling.

    Args:
        presence: Subtracted from tokens that were generated before.
        frequency: Subtracted from a token for each time that it was generated.
        bias: Added to the logits of these token ids.
    """

    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)


class PenaltyState:
    """Applies the penalties of one text, and counts its generated tokens."""

    def __init__(self, penalties: TokenPenalties) -> None:
        self._penalties = penalties
        self._counts: dict[int, int] = {}

    def apply(self, logits_1V: Tensor) -> Tensor:
        """Return the logits [1, V] with penalties and biases; they are not changed in place."""
        changes = dict(self._penalties.bias)
        for token, count in self._counts.items():
            penalty = self._penalties.presence + count * self._penalties.frequency
            changes[token] = changes.get(token, 0.0) - penalty
        if not changes:
            return logits_1V
        ids = torch.tensor(list(changes), device=logits_1V.device)
        added = torch.tensor(list(changes.values()), device=logits_1V.device)
        return logits_1V.float().index_add(1, ids, added[None])

    def count(self, token: int) -> None:
        """Count a generated token, if a penalty needs it."""
        if self._penalties.presence or self._penalties.frequency:
            self._counts[token] = self._counts.get(token, 0) + 1
