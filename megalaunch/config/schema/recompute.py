"""The `recompute` section: activations that are computed again instead of kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting

RecomputeModule = Literal["attention", "norm", "mlp", "activation", "moe", "shared_experts", "mla_up"]


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Memory for compute: full recomputes whole layers, selective the named modules."""

    granularity: Literal["none", "full", "selective"] = setting("none", "Nothing, whole layers, or some modules.")
    method: Literal["uniform", "block"] = setting(
        "uniform", "full: every chunk of num_layers, or only the first num_layers of a stage."
    )
    num_layers: int = setting(1, "Layers of a chunk (uniform) or of a stage (block).", minimum=1)
    modules: tuple[RecomputeModule, ...] = setting(("attention",), "selective: what is computed again.")
    cpu_offloading_num_layers: int = setting(
        0, "First layers of a stage whose activations wait in host memory.", minimum=0
    )
