"""The `model` section: the decoder's architecture and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalaunch.schema.mla import LatentAttentionSpec
from megalaunch.schema.moe import MoESpec
from megalaunch.schema.mtp import MultiTokenSpec
from megalaunch.schema.rope import RopeSpec
from megalaunch.schema.setting import setting

Family = Literal[
    "gpt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmoe",
]
Activation = Literal[
    "swiglu", "geglu", "geglu_tanh", "quick_geglu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"
]
AttentionBackend = Literal["auto", "flash", "cudnn", "efficient", "flex", "math", "flash_attn", "te"]
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu", "geglu_tanh", "quick_geglu"})
"""Activations whose feed-forward block has a gate projection besides its up projection."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Architecture of the decoder. A key without a default (`???` in YAML) must be set by a model option."""

    name: str = setting("custom", "Model name in tables and reports.")
    family: Family = setting("llama", "Model family: defines the blocks of the decoder and the names of its tensors.")
    num_layers: int = setting(meaning="Number of decoder layers.", minimum=1, maximum=100_000)
    hidden_size: int = setting(meaning="Width of the residual stream.", minimum=1)
    ffn_hidden_size: int = setting(meaning="Intermediate size of a dense feed-forward block.", minimum=1)
    num_attention_heads: int = setting(meaning="Number of query heads.", minimum=1)
    num_query_groups: int | None = setting(None, "Number of key/value heads; null: one per query head.", minimum=1)
    head_dim: int | None = setting(None, "Dimension of one head; null: hidden_size / num_attention_heads.", minimum=1)
    vocab_size: int | None = setting(None, "Vocabulary size; null: that of the tokenizer.", minimum=1)
    max_position_embeddings: int = setting(131072, "Longest sequence that the model supports.", "tokens", minimum=1)
    position_embedding: Literal["rope", "learned", "none"] = setting(
        "rope", "Position embedding: rotary, learned, or none."
    )
    activation: Activation = setting(
        "swiglu", "Activation of the feed-forward block; quick_geglu: gate * sigmoid(1.702 gate) * (up + 1)."
    )
    swiglu_limit: float | None = setting(
        None, "Clamp the gate to at most this and the up projection to +- this; null: no clamp.", minimum=0
    )
    norm: Literal["rmsnorm", "layernorm"] = setting("rmsnorm", "Normalization before each block and before the head.")
    norm_epsilon: float = setting(1e-5, "Added to the mean square (or variance) inside a norm.", minimum=0)
    norm_plus_one: bool = setting(False, "Norms scale by 1 + weight, and weights are initialized to 0.")
    norm_placement: Literal["pre", "post", "both"] = setting(
        "pre", "Normalize the input of each block (pre), its output (post), or both."
    )
    parallel_residual: bool = setting(
        False, "Attention and feed-forward block of a layer read the same input, and both outputs are added to it."
    )
    qk_norm: Literal["none", "head", "full"] = setting(
        "none", "Norm of queries and keys: per head, or over all heads together (full)."
    )
    qkv_bias: bool = setting(False, "Biases of the query, key and value projections.")
    attention_output_bias: bool = setting(False, "Bias of attention's output projection.")
    mlp_bias: bool = setting(False, "Biases of the feed-forward projections, experts included.")
    sliding_window: int | None = setting(None, "Tokens that a query attends to, itself included; null: all.", minimum=1)
    sliding_window_pattern: int | None = setting(
        None, "Every n-th layer uses full attention instead of the sliding window; null: none.", minimum=1
    )
    no_rope_layer_interval: int | None = setting(None, "Every n-th layer does not apply RoPE; null: none.", minimum=1)
    query_pre_attn_scalar: float | None = setting(
        None, "Attention scores are divided by the square root of this; null: of head_dim.", minimum=0
    )
    attn_logit_softcapping: float | None = setting(
        None, "Soft cap of attention scores: cap * tanh(score / cap); null: no cap.", minimum=0
    )
    final_logit_softcapping: float | None = setting(
        None, "Soft cap of the head's logits: cap * tanh(logit / cap); null: no cap.", minimum=0
    )
    attention_backend: AttentionBackend = setting(
        "auto",
        "Kernel of attention in training: of torch's operator (flash, cudnn, efficient), FlexAttention (flex), unfused "
        "operators (math), a package (flash_attn, te: Transformer Engine), or by device (auto).",
    )
    attention_sinks: bool = setting(
        False, "Each head has a learned logit that joins the softmax and contributes no value."
    )
    attention_output_gate: bool = setting(
        False, "Multiply attention's output by sigmoid(gate), where the gate is one more projection of the input."
    )
    hidden_dropout: float = setting(0.0, "Dropout of the embedding and of each block's output.", minimum=0, maximum=1)
    embedding_dropout: float | None = setting(
        None, "Dropout of the embedding; null: hidden_dropout.", minimum=0, maximum=1
    )
    attention_dropout: float = setting(0.0, "Dropout of the attention weights.", minimum=0, maximum=1)
    scale_embeddings: bool = setting(False, "Multiply token embeddings by the square root of hidden_size.")
    tie_word_embeddings: bool = setting(False, "The head shares the weight of the embedding.")
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", minimum=0)
    embedding_init_std: float | None = setting(
        None, "Standard deviation of the initial embedding; null: init_std.", minimum=0
    )
    rope: RopeSpec = field(default_factory=RopeSpec)
    moe: MoESpec = field(default_factory=MoESpec)
    mla: LatentAttentionSpec = field(default_factory=LatentAttentionSpec)
    mtp: MultiTokenSpec = field(default_factory=MultiTokenSpec)
