"""Rules of the model's shape alone."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.nearby import multiples, nearest
from megalaunch.plan.rules.registry import Broken, Situation, rule


@rule("model.head_dim", "The hidden size divides into heads unless model.head_dim is given.")
def head_dim(at: Situation) -> Iterator[Broken]:
    """Only an indivisible width leaves head_dim open."""
    model = at.spec.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.head_dim is None and hidden % heads:
        yield Broken(
            "model.num_attention_heads",
            f"hidden_size {hidden} does not divide by {heads} heads, and model.head_dim is not given",
            {"hidden_size": hidden, "num_attention_heads": heads},
            (
                *nearest("model.num_attention_heads", heads, lambda n: hidden % n == 0, 2),
                *multiples("model.hidden_size", hidden, 2 * heads),
            ),
        )


@rule("model.head_dim_even", "Rotary positions turn pairs of a head's numbers, so its width is even.")
def head_dim_even(at: Situation) -> Iterator[Broken]:
    """Half of the width is the number of frequencies."""
    width = at.spec.model.head_dim
    if width is not None and width % 2:
        yield Broken(
            "model.head_dim",
            f"head_dim {width} is odd, and rotary positions turn pairs",
            {"head_dim": width},
            ({"model.head_dim": width + 1}, {"model.head_dim": max(2, width - 1)}),
        )


@rule("model.heads_by_groups", "Query heads divide evenly over key/value heads.")
def heads_by_groups(at: Situation) -> Iterator[Broken]:
    """Every key/value head serves the same number of query heads."""
    heads, groups = at.spec.model.num_attention_heads, at.spec.model.num_query_groups
    if groups is not None and heads % groups:
        yield Broken(
            "model.num_query_groups",
            f"{heads} query heads do not divide over {groups} key/value heads",
            {"num_attention_heads": heads, "num_query_groups": groups},
            (*nearest("model.num_query_groups", groups, lambda n: heads % n == 0),),
        )


@rule("model.positions", "A sequence is no longer than the model has positions.")
def positions(at: Situation) -> Iterator[Broken]:
    """Beyond max_position_embeddings the rotary frequencies mean nothing."""
    length, limit = at.spec.batch.sequence_length, at.spec.model.max_position_embeddings
    if length > limit:
        yield Broken(
            "batch.sequence_length",
            f"sequence_length {length} is longer than the model's {limit} positions",
            {"sequence_length": length, "max_position_embeddings": limit},
            ({"batch.sequence_length": limit}, {"model.max_position_embeddings": length}),
        )


@rule("model.vocab_covers_tokenizer", "The vocabulary has a row for every token of the tokenizer.")
def vocab_covers_tokenizer(at: Situation) -> Iterator[Broken]:
    """Known ahead only for a tokenizer that is still to be trained."""
    vocab, tokens = at.spec.model.vocab_size, at.spec.tokenizer.vocab_size
    trained = at.spec.tokenizer.path is None and at.spec.data.corpus is not None
    if trained and vocab is not None and vocab < tokens:
        yield Broken(
            "model.vocab_size",
            f"vocab_size {vocab} is smaller than the tokenizer of {tokens} that is to be trained",
            {"vocab_size": vocab, "tokenizer_vocab_size": tokens},
            ({"tokenizer.vocab_size": vocab}, {"model.vocab_size": tokens}),
        )
