"""Sampling of the next token: repetition penalty, temperature, top-k, top-p, min-p; one random generator per row.

Shapes: B batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: Divides the logits. 0 is greedy decoding, where only the repetition penalty still has an effect.
        top_k: Keep the k most likely tokens; None: all.
        top_p: Of these, keep the smallest number of most likely tokens whose probabilities add up to at least this
            (nucleus sampling, Holtzman et al., 2019).
        seed: Seed of the rows' random generators.
        min_p: Drop tokens less likely than this fraction of the most likely one (Nguyen et al., 2024).
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens that the text already
            has, prompt included (Keskar et al., 2019).

    Raises:
        ValueError: A parameter is out of range; the message names it.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1234
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be 1 or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be over 0 and at most 1, not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min-p must be from 0 to 1, not {self.min_p}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ValueError(f"repetition penalty must be over 0, not {self.repetition_penalty}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


class Sampler:
    """Samples one token per row, and tracks the tokens of each row if there is a repetition penalty.

    A row's generator is seeded by the seed, its prompt and the index of its sample, so that its text does not depend on
    the other rows of the batch.
    """

    def __init__(self, sampling: Sampling, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> None:
        self._sampling, self._prompts = sampling, prompts
        # On the CPU, so that the same seed gives the same random numbers on every device.
        self._generators = [
            torch.Generator().manual_seed(row_seed(sampling.seed, prompt, sample))
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        self._held_BV: Tensor | None = None

    def next_tokens(self, logits_BV: Tensor) -> Tensor:
        """Sample a token of each row from logits [B, V]; return token ids [B], int64, on the CPU."""
        wide_BV = self.apply_repetition_penalty(logits_BV.float())
        next_B = self._sample(wide_BV)
        if self._held_BV is not None:
            self._held_BV.scatter_(1, next_B.to(self._held_BV.device)[:, None], True)
        return next_B

    def _sample(self, logits_BV: Tensor) -> Tensor:
        if self._sampling.temperature == 0:
            return logits_BV.argmax(dim=-1).cpu()
        probabilities = sampling_probs(logits_BV, self._sampling).cpu()
        drawn = [
            torch.multinomial(row, 1, generator=generator)
            for row, generator in zip(probabilities, self._generators, strict=True)
        ]
        return torch.cat(drawn)

    def apply_repetition_penalty(self, logits_BV: Tensor) -> Tensor:
        """Return the logits with the repetition penalty applied to the tokens of each row."""
        penalty = self._sampling.repetition_penalty
        if penalty == 1:
            return logits_BV
        if self._held_BV is None:
            self._held_BV = torch.zeros(logits_BV.shape, dtype=torch.bool)
            for num_tokens, prompt in zip(self._held_BV, self._prompts, strict=True):
                num_tokens[[token for token in set(prompt) if token < len(num_tokens)]] = True
            self._held_BV = self._held_BV.to(logits_BV.device)
        penalised = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        return torch.where(self._held_BV, penalised, logits_BV)


def row_seed(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return the seed of a row's generator, a hash of seed, sample index and prompt."""
    text = f"{seed} {sample} {' '.join(map(str, prompt))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 2**63


def sampling_probs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities [B, V], fp32, that tokens are sampled with. The temperature must not be 0."""
    # Subtract the maximum before the division: with a tiny temperature, softmax would compute inf - inf.
    logits_BV = logits_BV.float()
    scaled = (logits_BV - logits_BV.amax(dim=-1, keepdim=True)) / sampling.temperature
    probs_BV = torch.softmax(scaled, dim=-1)
    filtered_BV = probs_BV if sampling.top_k is None and sampling.top_p == 1 else _top_k_top_p(probs_BV, sampling)
    if sampling.min_p > 0:  # relative to the most likely token, which top-k and top-p always keep
        filtered_BV = _normalize(
            filtered_BV.masked_fill(probs_BV < sampling.min_p * probs_BV.amax(dim=-1, keepdim=True), 0)
        )
    return filtered_BV


def _top_k_top_p(probabilities_BV: Tensor, sampling: Sampling) -> Tensor:
    """Apply top-k, then top-p, to probabilities, and normalise them."""
    ranked, order = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = 0
        ranked = _normalize(ranked)
    if sampling.top_p < 1:
        before = ranked.cumsum(dim=-1) - ranked  # the total probability of more likely tokens
        ranked = _normalize(ranked.masked_fill(before >= sampling.top_p, 0))
    return torch.zeros_like(ranked).scatter_(1, order, ranked)


def _normalize(weights_BV: Tensor) -> Tensor:
    return weights_BV / weights_BV.sum(dim=-1, keepdim=True)
