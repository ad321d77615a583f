"""From logits to the next token: temperature, top-k, top-p, and a seed for each row.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature 0 always takes the likeliest one (then the rest means nothing).

    `top_k` keeps the k likeliest tokens; of these, `top_p` keeps the smallest number of likeliest tokens that
    hold at least that share of the probability (Holtzman et al., 2019). Raises ValueError, naming the setting.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be 1 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be over 0 and at most 1, not {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


class Sampler:
    """Draws one token a row. Row r draws from a generator of its own, so its text does not depend on the others."""

    def __init__(self, sampling: Sampling, batch: int) -> None:
        self._sampling = sampling
        # Drawn on the CPU: the same seed then means the same draws on every device.
        self._generators = [torch.Generator().manual_seed((sampling.seed + row) % 2**63) for row in range(batch)]

    def next_tokens(self, logits_BV: Tensor) -> Tensor:
        """Token ids [B], int64, on the CPU."""
        if self._sampling.temperature == 0:
            return logits_BV.float().argmax(dim=-1).cpu()
        probabilities = distribution(logits_BV, self._sampling).cpu()
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(probabilities, self._generators, strict=True)
        ]
        return torch.cat(drawn)


def distribution(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities [B, V], fp32, that tokens are drawn with (temperature over 0)."""
    # The largest is subtracted first: a tiny temperature must not make inf - inf.
    logits_BV = logits_BV.float()
    scaled = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / sampling.temperature
    probabilities, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        probabilities[:, sampling.top_k :] = 0
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1:
        before = probabilities.cumsum(dim=-1) - probabilities  # what the likelier tokens hold already
        probabilities[before >= sampling.top_p] = 0
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(1, order, probabilities)
