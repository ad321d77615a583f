"""Everything a decoder's shape depends on, with no null left: what a family's model section comes to."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.model import Activation


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of a layer: the first `rotary_dim` numbers of each head are rotated.

    The rest is read by the scaling that needs it (config/schema/rope.py says what each means).
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    factor: float = 1.0
    original_positions: int = 1
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float | None = None
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class NormConfig:
    """`layer`: a LayerNorm with its bias, else RMSNorm; `zero_centered_gamma`: the factor is 1 + weight."""

    epsilon: float
    layer: bool = False
    zero_centered_gamma: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """What layers differ in: the tokens that a query sees (None: all), and how it is rotated (None: not)."""

    window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Scores are q k / sqrt(query_pre_attn_scalar), softcapped, and weighed beside a sink where there are any."""

    num_heads: int
    num_groups: int
    head_dim: int
    query_pre_attn_scalar: float
    soft_cap: float | None = None
    sinks: bool = False
    qk_norm: str = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The feed-forward block."""

    width: int
    activation: Activation = "swiglu"
    clamp: float | None = None
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The whole decoder; `learned_positions` is the rows of their table, None: there is none."""

    layers: tuple[LayerConfig, ...]
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    norm_placement: str = "pre"
    parallel_residual: bool = False
    learned_positions: int | None = None
    embedding_scale: float = 1.0
    final_logit_softcapping: float | None = None
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    tie_word_embeddings: bool
    init_std: float
    embedding_init_std: float

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return max(self.hidden_dropout, self.embedding_dropout, self.attention.dropout) > 0

    @property
    def num_layers(self) -> int:
        """Layers of the whole decoder."""
        return len(self.layers)
