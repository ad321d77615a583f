"""The decoder's config: a model section with every value resolved (no null left), independent of the model family."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.model import Activation
from megalaunch.schema.moe import BalanceLoss, DropPolicy, ExpertChoice, RouterDtype, ScoreFunction


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE) of a layer: the first `rotary_dim` features of each head are rotated.

    Each of the other fields is read by the scaling that needs it; schema/rope.py documents them.
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
    """A norm: LayerNorm with bias if `layer`, else RMSNorm; `zero_centered_gamma`: the scale is 1 + weight."""

    epsilon: float
    layer: bool = False
    zero_centered_gamma: bool = False


@dataclass(frozen=True)
class LayerConfig:
    """Settings that differ between layers: sliding window in tokens (None: full attention) and RoPE (None: without).

    `experts`: the feed-forward block is a mixture of experts.
    """

    window: int | None
    rope: RopeConfig | None
    experts: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention; schema/mla.py documents the fields. `q_lora_rank` None: queries have no latent."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_epsilon: float


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention: scores are softcap(q k * softmax_scale); `sinks`: a logit per head joins the softmax.

    `output_gate`: the output of each head is multiplied by the sigmoid of a projection of the input. `head_dim` is the
    width of a query and key head. `latent` None: keys and values are projected without a latent.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    softmax_scale: float
    soft_cap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    qk_norm: str = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    dropout: float = 0.0
    latent: LatentConfig | None = None


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The feed-forward block."""

    width: int
    activation: Activation = "swiglu"
    clamp: float | None = None
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts. `expert` is the block of one expert, `shared_experts` the one block that every token passes.

    The other fields are those of `model.moe`; schema/moe.py documents them.
    """

    num_experts: int
    top_k: int
    expert: MLPConfig
    shared_experts: MLPConfig | None = None
    shared_expert_gate: bool = False
    score: ScoreFunction = "softmax"
    normalize_top_k: bool = True
    scaling_factor: float = 1.0
    router_bias: bool = False
    router_dtype: RouterDtype = "fp32"
    balance_bias: bool = False
    num_groups: int | None = None
    top_k_groups: int | None = None
    group_score_top_k: int = 1
    balance_loss: BalanceLoss = "none"
    balance_loss_coeff: float = 0.0
    choice: ExpertChoice = "scores"
    z_loss_coeff: float = 0.0
    capacity_factor: float | None = None
    drop_policy: DropPolicy = "probs"
    pad_to_capacity: bool = False
    input_jitter: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The whole decoder. `learned_positions`: rows of the learned position embedding; None: there is none.

    `mtp_layers` are those of the depths of multi-token prediction.
    """

    layers: tuple[LayerConfig, ...]
    mtp_layers: tuple[LayerConfig, ...] = ()
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig
    mlp: MLPConfig
    moe: MoEConfig | None = None
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
    def needs_seeds(self) -> bool:
        """True if any dropout rate or the jitter of routers is above 0."""
        jitter = 0.0 if self.moe is None else self.moe.input_jitter
        return max(self.hidden_dropout, self.embedding_dropout, self.attention.dropout, jitter) > 0

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole decoder, without those of MTP depths."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers of the decoder, then those of MTP depths."""
        return self.layers + self.mtp_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts, among all layers."""
        return tuple(number for number, layer in enumerate(self.all_layers) if layer.experts)
