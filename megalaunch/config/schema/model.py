"""The `model` section: the decoder's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of one decoder. `???` in YAML and no default here mean that a model option must say it."""

    name: str = setting("custom", "Name shown in tables and reports.")
    family: Literal["llama"] = setting("llama", "Family file that assembles the decoder and names its tensors.")
    num_layers: int = setting(meaning="Decoder layers.", minimum=1)
    hidden_size: int = setting(meaning="Width of the residual stream.", minimum=1)
    ffn_hidden_size: int = setting(meaning="Inner width of the feed-forward block.", minimum=1)
    num_attention_heads: int = setting(meaning="Query heads.", minimum=1)
    num_query_groups: int | None = setting(None, "Key/value heads; null: one per query head.", minimum=1)
    head_dim: int | None = setting(None, "Width of one head; null: hidden_size / num_attention_heads.", minimum=1)
    vocab_size: int | None = setting(None, "Vocabulary; null: that of the tokenizer.", minimum=1)
    max_position_embeddings: int = setting(131072, "Longest sequence the model is made for.", "tokens", minimum=1)
    norm_epsilon: float = setting(1e-5, "Added to the mean square inside RMSNorm.", minimum=0)
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", minimum=1)
    tied_embeddings: bool = setting(False, "The head reuses the embedding matrix.")
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", minimum=0)
