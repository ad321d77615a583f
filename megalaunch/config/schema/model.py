"""The `model` section: the decoder's shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.config.schema.mla import LatentAttentionSpec
from megalaunch.config.schema.moe import MoESpec
from megalaunch.config.schema.mtp import MultiTokenSpec
from megalaunch.config.schema.rope import RopeSpec
from megalaunch.config.schema.setting import setting

Family = Literal[
    "gpt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "smollm3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "deepseek",
    "gpt_oss",
    "olmoe",
]
Activation = Literal[
    "swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"
]
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "geglu_tanh", "quick_geglu"})
"""Activations whose feed-forward block has a gate beside its up projection."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one decoder. `???` in YAML and no default here mean that a model option must say it."""

    name: str = setting("custom", "Name shown in tables and reports.")
    family: Family = setting("llama", "Family file that assembles the decoder and names its tensors.")
    num_layers: int = setting(meaning="Decoder layers.", minimum=1, maximum=100_000)
    hidden_size: int = setting(meaning="Width of the residual stream.", minimum=1)
    ffn_hidden_size: int = setting(meaning="Inner width of a dense feed-forward block.", minimum=1)
    num_attention_heads: int = setting(meaning="Query heads.", minimum=1)
    num_query_groups: int | None = setting(None, "Key/value heads; null: one per query head.", minimum=1)
    head_dim: int | None = setting(None, "Width of one head; null: hidden_size / num_attention_heads.", minimum=1)
    vocab_size: int | None = setting(None, "Vocabulary; null: that of the tokenizer.", minimum=1)
    max_position_embeddings: int = setting(131072, "Longest sequence the model is made for.", "tokens", minimum=1)
    position_embedding: Literal["rope", "learned", "none"] = setting("rope", "How a token knows where it stands.")
    activation: Activation = setting(
        "swiglu", "Of the feed-forward block; quick_geglu: gate * sigmoid(1.702 gate) * (up + 1)."
    )
    swiglu_limit: float | None = setting(None, "Gate and up are clamped to this size; null: not.", minimum=0)
    norm: Literal["rmsnorm", "layernorm"] = setting("rmsnorm", "Before each block and before the head.")
    norm_epsilon: float = setting(1e-5, "Added to the mean square (or variance) inside a norm.", minimum=0)
    norm_plus_one: bool = setting(False, "Norms multiply by 1 + weight, and weights start at 0.")
    norm_placement: Literal["pre", "post", "both"] = setting(
        "pre", "Norms of what goes into each block, of what comes out of it, or of both."
    )
    parallel_residual: bool = setting(
        False, "Both blocks of a layer read the same stream, and are added to it at once."
    )
    qk_norm: Literal["none", "head", "full"] = setting(
        "none", "Norm of queries and keys: of each head alone, or over all heads together."
    )
    qkv_bias: bool = setting(False, "Biases of the query, key and value projections.")
    attention_output_bias: bool = setting(False, "Bias of attention's output projection.")
    mlp_bias: bool = setting(False, "Biases of the feed-forward projections, experts included.")
    sliding_window: int | None = setting(None, "Tokens that a query sees, itself included; null: all.", minimum=1)
    sliding_window_pattern: int | None = setting(
        None, "With a sliding window: every n-th layer sees all tokens; null: none does.", minimum=1
    )
    no_rope_layer_interval: int | None = setting(
        None, "Every n-th layer leaves its queries and keys unrotated; null: none does.", minimum=1
    )
    query_pre_attn_scalar: float | None = setting(
        None, "Scores are divided by the square root of this; null: of head_dim.", minimum=0
    )
    attn_logit_softcapping: float | None = setting(
        None, "Scores are kept below this size: cap * tanh(score / cap); null: they are not.", minimum=0
    )
    final_logit_softcapping: float | None = setting(None, "The same of the head's logits.", minimum=0)
    attention_sinks: bool = setting(False, "A learned logit a head joins each softmax, and is then dropped.")
    hidden_dropout: float = setting(0.0, "Dropout of the embedding and of each block's output.", minimum=0, maximum=1)
    embedding_dropout: float | None = setting(
        None, "Dropout of the embedding; null: hidden_dropout.", minimum=0, maximum=1
    )
    attention_dropout: float = setting(0.0, "Dropout of the attention weights.", minimum=0, maximum=1)
    scale_embeddings: bool = setting(False, "Token vectors are multiplied by the square root of hidden_size.")
    tie_word_embeddings: bool = setting(False, "The head reuses the embedding matrix.")
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", minimum=0)
    embedding_init_std: float | None = setting(None, "The same of the embedding; null: init_std.", minimum=0)
    rope: RopeSpec = field(default_factory=RopeSpec)
    moe: MoESpec = field(default_factory=MoESpec)
    mla: LatentAttentionSpec = field(default_factory=LatentAttentionSpec)
    mtp: MultiTokenSpec = field(default_factory=MultiTokenSpec)
