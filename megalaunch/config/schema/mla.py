"""The `model.mla` section: multi-head latent attention (DeepSeek-V2)."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """Keys and values are read from one narrow latent; kv_lora_rank null: ordinary attention."""

    kv_lora_rank: int | None = setting(None, "Width of the key/value latent; null: no latent attention.", minimum=1)
    q_lora_rank: int | None = setting(
        None, "Width of the query latent; null: queries are projected at once.", minimum=1
    )
    qk_nope_head_dim: int = setting(128, "Part of a query/key head without position.", minimum=1)
    qk_rope_head_dim: int = setting(64, "Part of it with rotary position, one key for all heads.", minimum=1)
    v_head_dim: int = setting(128, "Width of a value head.", minimum=1)
