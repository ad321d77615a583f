"""Log-likelihoods of continuations given their contexts, for many pairs in batches.

Shapes: B batch, S positions, H hidden, V vocabulary, C positions that are scored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalaunch.engine.inference.generate import token_logprobs
from megalaunch.engine.inference.sequence_text import RowLogprobs
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.scored_pairs import Pair, check_pairs

_SCORED_AT_ONCE = 256  # positions whose logits are held: [256, V]
_FILLER = 0  # right padding; with causal attention no real token attends to it


class LogLikelihood(NamedTuple):
    """`logprob`: nats, summed over tokens; `greedy`: whether each token is the most likely one at its position."""

    logprob: float
    greedy: bool


def loglikelihoods(
    model: Decoder, pairs: Sequence[Pair], batch_size: int, longest: int
) -> Iterator[tuple[int, LogLikelihood]]:
    """Yield the index and the log-likelihood of each pair (context, continuation).

    Rows are batched by length, the longest first. Pairs that differ only in their last token share one forward pass,
    such as the one-letter answers to a question.

    Args:
        model: The decoder; it holds the whole model.
        pairs: Tokens of context and continuation.
        batch_size: Rows per forward pass.
        longest: Maximum tokens of a row; longer contexts are truncated from the left.

    Raises:
        PairError: As `check_pairs`.
    """
    check_pairs(pairs, longest)
    rows: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (before, after) in enumerate(pairs):
        rows[(*before, *after)[-longest - 1 : -1]].append(number)
    ordered = sorted(rows, key=len, reverse=True)
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        for row, states_SH in zip(batch, _states(model, batch), strict=True):
            asked = [(number, pairs[number][1]) for number in rows[row]]
            logprobs_CV = _logprobs(model, states_SH[: len(row)], max(len(after) for _, after in asked))
            yield from ((number, _likelihood(logprobs_CV, after)) for number, after in asked)


def prompt_logprobs(
    model: Decoder, tokens: Sequence[int], num_top: int, vocab_size: int | None = None
) -> Iterator[RowLogprobs]:
    """Yield the log-probabilities of each token of a text given those before it, from the second token on.

    Args:
        model: The decoder; it holds the whole model.
        tokens: The tokens of the text.
        num_top: The number of most likely tokens at each position.
        vocab_size: Ids from here on are no tokens: an embedding may have more rows than its tokenizer.
    """
    if len(tokens) < 2:
        return
    (states_SH,) = _states(model, [tokens[:-1]])
    for start in range(0, len(tokens) - 1, _SCORED_AT_ONCE):
        part_SH = states_SH[start : start + _SCORED_AT_ONCE]
        logits_CV = _logits(model, part_SH, len(part_SH))[:, :vocab_size]
        chosen_C = torch.tensor(tokens[start + 1 : start + 1 + len(part_SH)])
        found = token_logprobs(logits_CV, chosen_C, num_top)
        assert found is not None, "their number was given"
        yield from map(found.row, range(len(part_SH)))


@torch.inference_mode()
def _states(model: Decoder, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the head's input of padded rows, [B, S, H]."""
    width = max(map(len, rows))
    tokens_BS = torch.tensor([[*row, *[_FILLER] * (width - len(row))] for row in rows], device=model.device)
    states_BSH: Tensor = model(tokens_BS, logits=False)
    return states_BSH


@torch.inference_mode()
def _logprobs(model: Decoder, states_SH: Tensor, count: int) -> Tensor:
    """Return the next token's log-probabilities at each of the last `count` positions, fp32 [C, V]."""
    return _logits(model, states_SH, count).float().log_softmax(dim=-1)


@torch.inference_mode()
def _logits(model: Decoder, states_SH: Tensor, count: int) -> Tensor:
    """Return the next token's logits at each of the last `count` positions, [C, V]."""
    assert model.head is not None, "a whole model"
    (logits_CV,) = model.tp_region.column_parallel_linear(states_SH[None, -count:], model.head)
    return model.softcap_logits(logits_CV)[0]


def _likelihood(logprobs_CV: Tensor, after: Sequence[int]) -> LogLikelihood:
    places_CV = logprobs_CV[-len(after) :]
    tokens_C = torch.tensor(after, device=places_CV.device)
    chosen = places_CV.gather(1, tokens_C[:, None]).sum()
    return LogLikelihood(float(chosen), bool((places_CV.argmax(dim=-1) == tokens_C).all()))
