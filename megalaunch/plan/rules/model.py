"""Rules of the model's shape alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalaunch.config.schema.model import GATED, ModelSpec
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest
from megalaunch.platform.chips import CHIPS


@rule("model.head_dim", "The hidden size divides into heads unless model.head_dim is given.")
def head_dim(at: RuleContext) -> Iterator[Violation]:
    """Only an indivisible width leaves head_dim open."""
    model = at.spec.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.head_dim is None and model.mla.kv_lora_rank is None and hidden % heads:
        yield Violation(
            "model.num_attention_heads",
            f"hidden_size {hidden} does not divide by {heads} heads, and model.head_dim is not given",
            {"hidden_size": hidden, "num_attention_heads": heads},
            (
                *nearest("model.num_attention_heads", heads, lambda n: hidden % n == 0, 2),
                *multiples("model.hidden_size", hidden, 2 * heads),
            ),
        )


@rule("model.head_dim_even", "Rotary positions turn pairs of a head's numbers, so its width is even.")
def head_dim_even(at: RuleContext) -> Iterator[Violation]:
    """Half of the width is the number of frequencies."""
    model, width = at.spec.model, at.spec.model.head_dim
    whole = model.position_embedding == "rope" and model.mla.kv_lora_rank is None and model.rope.fraction == 1
    if whole and width is not None and width % 2:
        yield Violation(
            "model.head_dim",
            f"head_dim {width} is odd, and rotary positions turn pairs",
            {"head_dim": width},
            ({"model.head_dim": width + 1}, {"model.head_dim": max(2, width - 1)}),
        )


@rule("model.heads_by_groups", "Query heads divide evenly over key/value heads.")
def heads_by_groups(at: RuleContext) -> Iterator[Violation]:
    """Every key/value head serves the same number of query heads."""
    heads, groups = at.spec.model.num_attention_heads, at.spec.model.num_query_groups
    if groups is not None and heads % groups:
        yield Violation(
            "model.num_query_groups",
            f"{heads} query heads do not divide over {groups} key/value heads",
            {"num_attention_heads": heads, "num_query_groups": groups},
            (*nearest("model.num_query_groups", groups, lambda n: heads % n == 0),),
        )


@rule("model.positions", "A sequence is no longer than the model has positions.")
def positions(at: RuleContext) -> Iterator[Violation]:
    """Beyond max_position_embeddings a learned position has no row, and rotary frequencies mean nothing."""
    length, limit = at.spec.batch.sequence_length, at.spec.model.max_position_embeddings
    if length > limit:
        yield Violation(
            "batch.sequence_length",
            f"sequence_length {length} is longer than the model's {limit} positions",
            {"sequence_length": length, "max_position_embeddings": limit},
            ({"batch.sequence_length": limit}, {"model.max_position_embeddings": length}),
        )


@rule("model.vocab_covers_tokenizer", "The vocabulary has a row for every token of the tokenizer.")
def vocab_covers_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """Known ahead only for a tokenizer that is still to be trained."""
    vocab, tokens = at.spec.model.vocab_size, at.spec.tokenizer.vocab_size
    trained = at.spec.tokenizer.path is None and at.spec.data.corpus is not None
    if trained and vocab is not None and vocab < tokens:
        yield Violation(
            "model.vocab_size",
            f"vocab_size {vocab} is smaller than the tokenizer of {tokens} that is to be trained",
            {"vocab_size": vocab, "tokenizer_vocab_size": tokens},
            ({"tokenizer.vocab_size": vocab}, {"model.vocab_size": tokens}),
        )


@rule("model.swiglu_limit_needs_gate", "What is clamped is the gate and what it opens for.")
def swiglu_limit_needs_gate(at: RuleContext) -> Iterator[Violation]:
    """swiglu_limit is defined for feed-forward blocks with a gate (GPT-OSS)."""
    model = at.spec.model
    if model.swiglu_limit is not None and model.activation not in GATED:
        yield Violation(
            "model.swiglu_limit",
            f"swiglu_limit {model.swiglu_limit:g} needs a gated activation ({', '.join(sorted(GATED))}), "
            f"and model.activation is {model.activation}",
            {"swiglu_limit": model.swiglu_limit},
            ({"model.swiglu_limit": None}, {"model.activation": "swiglu"}),
        )


@rule("model.swiglu_limit_positive", "Activations are clamped to a size above 0.")
def swiglu_limit_positive(at: RuleContext) -> Iterator[Violation]:
    """At 0 nothing passes."""
    if at.spec.model.swiglu_limit == 0:
        yield Violation(
            "model.swiglu_limit",
            "a swiglu_limit of 0 lets nothing through; null clamps nothing",
            {"swiglu_limit": 0.0},
            ({"model.swiglu_limit": None}, {"model.swiglu_limit": 7.0}),
        )


@rule("model.dropout", "Dropout leaves something.")
def dropout(at: RuleContext) -> Iterator[Violation]:
    """At 1 every number is dropped, and what is left is divided by 0."""
    for key in ("hidden_dropout", "embedding_dropout", "attention_dropout"):
        if getattr(at.spec.model, key) == 1:
            yield Violation(
                f"model.{key}", f"{key} 1 drops everything", {key: 1.0}, ({f"model.{key}": 0.1}, {f"model.{key}": 0.0})
            )


@rule("model.init_std", "Initial weights differ from 0.")
def init_std(at: RuleContext) -> Iterator[Violation]:
    """With all matrices 0 every gradient but the last is 0, too, and nothing is ever learned."""
    if at.spec.model.init_std == 0:
        yield Violation(
            "model.init_std",
            "init_std 0 starts with weights of 0, from which nothing is learned",
            {"init_std": 0.0},
            ({"model.init_std": 0.02},),
            severity="warning",
        )


@rule("model.norm_epsilon", "A norm divides by more than 0.")
def norm_epsilon(at: RuleContext) -> Iterator[Violation]:
    """A row of zeros, as dropout or padding makes them, has a mean square of 0."""
    if at.spec.model.norm_epsilon == 0:
        yield Violation(
            "model.norm_epsilon",
            "with norm_epsilon 0 the norm of a row of zeros is 0 / 0",
            {"norm_epsilon": 0.0},
            ({"model.norm_epsilon": 1e-5}, {"model.norm_epsilon": 1e-6}),
        )


@rule("model.widths_alignment", "Widths are multiples of 8, the grain of 16-bit tensor cores.")
def widths_alignment(at: RuleContext) -> Iterator[Violation]:
    """Other widths are padded inside every matmul, or computed by far slower kernels (NVIDIA's matmul guide)."""
    model, chip = at.spec.model, CHIPS.get(at.spec.platform.chip)
    if chip is None or chip.device == "cpu" or at.spec.precision.compute_dtype == "fp32":
        return
    widths = {"hidden_size": model.hidden_size, "ffn_hidden_size": model.ffn_hidden_size}
    if model.head_dim is not None and model.mla.kv_lora_rank is None:
        widths["head_dim"] = model.head_dim
    for key, width in widths.items():
        if width % 8:
            yield Violation(
                f"model.{key}",
                f"{key} {width} is no multiple of 8, so that 16-bit matmuls are slow",
                {key: width},
                (*multiples(f"model.{key}", width, 8),),
                severity="warning",
            )


@rule("model.vocab_alignment", "The vocabulary is a multiple of 64, which the head's matmul likes.")
def vocab_alignment(at: RuleContext) -> Iterator[Violation]:
    """Published models keep their sizes; one of your own gains a few percent of a step by a few unused rows."""
    vocab, chip = at.spec.model.vocab_size, CHIPS.get(at.spec.platform.chip)
    if vocab is None or chip is None or chip.device == "cpu" or vocab % 64 == 0:
        return
    padded = -(-vocab // 64) * 64
    yield Violation(
        "model.vocab_size",
        f"vocab_size {vocab} is no multiple of 64: {padded} would make the head's matmul faster",
        {"vocab_size": vocab, "padded": padded},
        ({"model.vocab_size": padded},),
        severity="note",
    )


_BLOCKS: dict[str, tuple[Callable[[ModelSpec], bool], tuple[str, ...]]] = {
    "experts": (
        lambda model: model.moe.num_experts is not None,
        ("mixtral", "qwen3", "deepseek", "gpt_oss", "olmoe"),
    ),
    "shared experts": (
        lambda model: model.moe.num_experts is not None and model.moe.shared_ffn_hidden_size > 0,
        ("deepseek",),
    ),
    "latent attention": (lambda model: model.mla.kv_lora_rank is not None, ("deepseek",)),
    "multi-token prediction": (lambda model: model.mtp.num_layers > 0, ("deepseek",)),
    "attention sinks": (lambda model: model.attention_sinks, ("gpt_oss",)),
    "learned positions": (lambda model: model.position_embedding == "learned", ("gpt",)),
    "norms of queries and keys": (lambda model: model.qk_norm != "none", ("qwen3", "gemma3", "olmo2", "olmoe")),
    "norms after the blocks": (lambda model: model.norm_placement != "pre", ("gemma2", "gemma3", "olmo2")),
    "soft caps": (
        lambda model: model.attn_logit_softcapping is not None or model.final_logit_softcapping is not None,
        ("gemma2", "gemma3"),
    ),
    "unrotated layers": (lambda model: model.no_rope_layer_interval is not None, ("smollm3",)),
}  # block: whether a model has it, and the families whose published checkpoints have names for it


@rule("model.family_blocks", "The family's published checkpoints have names for every block of the model.")
def family_blocks(at: RuleContext) -> Iterator[Violation]:
    """A family names tensors as Hugging Face does; what it has no name for trains, but is not exported or imported."""
    model = at.spec.model
    for block, (present, families) in _BLOCKS.items():
        if present(model) and model.family not in families:
            yield Violation(
                "model.family",
                f"family {model.family} has no names for {block}: such a model trains, but does not export "
                f"(families that have: {', '.join(families)})",
                fixes=tuple({"model.family": family} for family in families),
                severity="warning",
            )
