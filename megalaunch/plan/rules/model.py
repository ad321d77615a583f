"""Rules of the model's dimensions, activations, initialisation and family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples, nearest
from megalaunch.platform.chips import CHIPS
from megalaunch.schema.model import GATED, ModelSpec


@rule("model.head_dim", "hidden_size is divisible by num_attention_heads, unless head_dim is given.")
def head_dim(at: RuleContext) -> Iterator[Violation]:
    """head_dim is derived as their quotient."""
    model = at.spec.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.head_dim is None and model.mla.kv_lora_rank is None and hidden % heads:
        yield Violation(
            "model.num_attention_heads",
            f"hidden_size {hidden} is not divisible by {heads} heads, and model.head_dim is not given",
            {"hidden_size": hidden, "num_attention_heads": heads},
            (
                *nearest("model.num_attention_heads", heads, lambda n: hidden % n == 0, 2),
                *multiples("model.hidden_size", hidden, 2 * heads),
            ),
        )


@rule("model.head_dim_even", "head_dim is even with RoPE.")
def head_dim_even(at: RuleContext) -> Iterator[Violation]:
    """RoPE rotates pairs of dimensions: half of the width is the number of frequencies."""
    model, width = at.spec.model, at.spec.model.head_dim
    rotates_full_head = (
        model.position_embedding == "rope" and model.mla.kv_lora_rank is None and model.rope.fraction == 1
    )
    if rotates_full_head and width is not None and width % 2:
        yield Violation(
            "model.head_dim",
            f"head_dim {width} is odd, but RoPE rotates pairs",
            {"head_dim": width},
            ({"model.head_dim": width + 1}, {"model.head_dim": max(2, width - 1)}),
        )


@rule("model.heads_by_groups", "num_attention_heads is divisible by num_query_groups.")
def heads_by_groups(at: RuleContext) -> Iterator[Violation]:
    """Every key/value head has the same number of query heads."""
    heads, groups = at.spec.model.num_attention_heads, at.spec.model.num_query_groups
    if groups is not None and heads % groups:
        yield Violation(
            "model.num_query_groups",
            f"{heads} query heads are not divisible by {groups} key/value heads",
            {"num_attention_heads": heads, "num_query_groups": groups},
            (*nearest("model.num_query_groups", groups, lambda n: heads % n == 0),),
        )


@rule("model.positions", "sequence_length is at most max_position_embeddings.")
def positions(at: RuleContext) -> Iterator[Violation]:
    """Beyond it a learned position has no row, and RoPE frequencies mean nothing."""
    length, limit = at.spec.batch.sequence_length, at.spec.model.max_position_embeddings
    if length > limit:
        yield Violation(
            "batch.sequence_length",
            f"sequence_length {length} is above max_position_embeddings {limit}",
            {"sequence_length": length, "max_position_embeddings": limit},
            ({"batch.sequence_length": limit}, {"model.max_position_embeddings": length}),
        )


@rule("model.vocab_covers_tokenizer", "vocab_size is at least that of the tokenizer.")
def vocab_covers_tokenizer(at: RuleContext) -> Iterator[Violation]:
    """Checked for a tokenizer that is still to be trained."""
    vocab, tokens = at.spec.model.vocab_size, at.spec.tokenizer.vocab_size
    trained = at.spec.tokenizer.path is None and at.spec.data.corpus is not None
    if trained and vocab is not None and vocab < tokens:
        yield Violation(
            "model.vocab_size",
            f"vocab_size {vocab} is below the {tokens} tokens of the tokenizer to be trained",
            {"vocab_size": vocab, "tokenizer_vocab_size": tokens},
            ({"tokenizer.vocab_size": vocab}, {"model.vocab_size": tokens}),
        )


@rule("model.swiglu_limit_needs_gate", "swiglu_limit is set only for a gated activation.")
def swiglu_limit_needs_gate(at: RuleContext) -> Iterator[Violation]:
    """It clamps gate and up of a gated feed-forward block (GPT-OSS)."""
    model = at.spec.model
    if model.swiglu_limit is not None and model.activation not in GATED:
        yield Violation(
            "model.swiglu_limit",
            f"swiglu_limit {model.swiglu_limit:g} needs a gated activation ({', '.join(sorted(GATED))}), "
            f"but model.activation is {model.activation}",
            {"swiglu_limit": model.swiglu_limit},
            ({"model.swiglu_limit": None}, {"model.activation": "swiglu"}),
        )


@rule("model.swiglu_limit_positive", "swiglu_limit is above 0.")
def swiglu_limit_positive(at: RuleContext) -> Iterator[Violation]:
    """A limit of 0 clamps every value to 0."""
    if at.spec.model.swiglu_limit == 0:
        yield Violation(
            "model.swiglu_limit",
            "swiglu_limit 0 clamps every value to 0; null disables clamping",
            {"swiglu_limit": 0.0},
            ({"model.swiglu_limit": None}, {"model.swiglu_limit": 7.0}),
        )


@rule("model.dropout", "Dropout rates are below 1.")
def dropout(at: RuleContext) -> Iterator[Violation]:
    """A rate of 1 drops every value, and the rescaling divides by 0."""
    for key in ("hidden_dropout", "embedding_dropout", "attention_dropout"):
        if getattr(at.spec.model, key) == 1:
            yield Violation(
                f"model.{key}", f"{key} 1 drops every value", {key: 1.0}, ({f"model.{key}": 0.1}, {f"model.{key}": 0.0})
            )


@rule("model.init_std", "init_std is above 0.")
def init_std(at: RuleContext) -> Iterator[Violation]:
    """If all matrices are 0, every gradient but the last is 0 too, and nothing is learned."""
    if at.spec.model.init_std == 0:
        yield Violation(
            "model.init_std",
            "init_std 0 initialises all weights to 0, so nothing is learned",
            {"init_std": 0.0},
            ({"model.init_std": 0.02},),
            severity="warning",
        )


@rule("model.norm_epsilon", "norm_epsilon is above 0.")
def norm_epsilon(at: RuleContext) -> Iterator[Violation]:
    """A row of zeros, from dropout or padding, has a mean square of 0."""
    if at.spec.model.norm_epsilon == 0:
        yield Violation(
            "model.norm_epsilon",
            "with norm_epsilon 0 the norm of a row of zeros is 0 / 0",
            {"norm_epsilon": 0.0},
            ({"model.norm_epsilon": 1e-5}, {"model.norm_epsilon": 1e-6}),
        )


@rule("model.widths_alignment", "hidden_size, ffn_hidden_size and head_dim are multiples of 8.")
def widths_alignment(at: RuleContext) -> Iterator[Violation]:
    """16-bit tensor cores pad other widths in every matmul, or far slower kernels run (NVIDIA's matmul guide)."""
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
                f"{key} {width} is not a multiple of 8, which makes 16-bit matmuls slow",
                {key: width},
                (*multiples(f"model.{key}", width, 8),),
                severity="warning",
            )


@rule("model.vocab_alignment", "vocab_size is a multiple of 64.")
def vocab_alignment(at: RuleContext) -> Iterator[Violation]:
    """The head's matmul is faster then: a few unused rows save a few percent of a step.

    Published models keep their sizes.
    """
    vocab, chip = at.spec.model.vocab_size, CHIPS.get(at.spec.platform.chip)
    if vocab is None or chip is None or chip.device == "cpu" or vocab % 64 == 0:
        return
    padded = -(-vocab // 64) * 64
    yield Violation(
        "model.vocab_size",
        f"vocab_size {vocab} is not a multiple of 64: {padded} would make the head's matmul faster",
        {"vocab_size": vocab, "padded": padded},
        ({"model.vocab_size": padded},),
        severity="note",
    )


_BLOCKS: dict[str, tuple[Callable[[ModelSpec], bool], tuple[str, ...]]] = {
    "experts": (
        lambda model: model.moe.num_experts is not None,
        ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe"),
    ),
    "shared experts": (
        lambda model: model.moe.num_experts is not None and model.moe.shared_ffn_hidden_size > 0,
        ("qwen2_moe", "deepseek_v2", "deepseek_v3"),
    ),
    "the gate of shared experts": (lambda model: model.moe.shared_expert_gate, ("qwen2_moe",)),
    "latent attention": (lambda model: model.mla.kv_lora_rank is not None, ("deepseek_v2", "deepseek_v3")),
    "multi-token prediction": (lambda model: model.mtp.num_layers > 0, ("deepseek_v3",)),
    "attention sinks": (lambda model: model.attention_sinks, ("gpt_oss",)),
    "output gates of attention": (lambda model: model.attention_output_gate, ()),
    "learned positions": (lambda model: model.position_embedding == "learned", ("gpt",)),
    "QK norm": (lambda model: model.qk_norm != "none", ("qwen3", "qwen3_moe", "gemma3", "olmo2", "olmoe")),
    "norms after the blocks": (lambda model: model.norm_placement != "pre", ("gemma2", "gemma3", "olmo2")),
    "soft caps": (
        lambda model: model.attn_logit_softcapping is not None or model.final_logit_softcapping is not None,
        ("gemma2", "gemma3"),
    ),
    "layers without RoPE": (lambda model: model.no_rope_layer_interval is not None, ("smollm3",)),
}  # block: whether a model has it, and the families whose published checkpoints have names for it


@rule("model.family_blocks", "The family's checkpoint format has names for every block of the model.")
def family_blocks(at: RuleContext) -> Iterator[Violation]:
    """Tensors are named as in Hugging Face. A model with unnamed blocks trains, but is not exported or imported."""
    model = at.spec.model
    for block, (present, families) in _BLOCKS.items():
        if present(model) and model.family not in families:
            named = f"families with these names: {', '.join(families)}" if families else "no family has these names"
            yield Violation(
                "model.family",
                f"family {model.family} has no tensor names for {block}: such a model trains, but is not exported "
                f"({named})",
                fixes=tuple({"model.family": family} for family in families),
                severity="warning",
            )
