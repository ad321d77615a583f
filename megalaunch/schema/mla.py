"""The `model.mla` section: multi-head latent attention (DeepSeek-V2)."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention: keys and values are projected from one low-rank latent."""

    kv_lora_rank: int | None = setting(None, "Rank of the key/value latent; null: no latent attention.", minimum=1)
    q_lora_rank: int | None = setting(None, "Rank of the query latent; null: project queries without one.", minimum=1)
    qk_nope_head_dim: int = setting(128, "Dimensions of a query/key head without rotary position embedding.", minimum=1)
    qk_rope_head_dim: int = setting(
        64,
        "Dimensions of a query/key head with rotary position embedding; all heads share this part of the key.",
        minimum=1,
    )
    v_head_dim: int = setting(128, "Dimension of a value head.", minimum=1)
    norm_epsilon: float = setting(
        1e-6, "Added to the mean square inside the norms of the latents, whatever model.norm_epsilon is.", minimum=0
    )
