"""Pairs (context, continuation) of token ids whose log-likelihood can be computed, by any model and layout."""

from __future__ import annotations

from collections.abc import Sequence

Pair = tuple[Sequence[int], Sequence[int]]


class PairError(ValueError):
    """A pair that cannot be scored."""


def check_pairs(pairs: Sequence[Pair], longest: int) -> None:
    """Check that each continuation can be scored; as in lm-eval's `hf`, contexts are truncated, continuations never.

    Args:
        pairs: Token ids of contexts and continuations.
        longest: Maximum tokens of a row.

    Raises:
        PairError: A context or continuation is empty, or a continuation has more than `longest` tokens.
    """
    for number, (before, after) in enumerate(pairs):
        if not before or not after:
            raise PairError(f"pair {number} of texts has no token {'after' if before else 'before'} the border")
        if len(after) > longest:
            raise PairError(
                f"the continuation of pair {number} has {len(after)} tokens, more than the {longest} that fit a row; "
                "only contexts are truncated"
            )
