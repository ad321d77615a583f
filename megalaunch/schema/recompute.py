"""The `recompute` section: activation checkpointing and offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting

RecomputeModule = Literal["attention", "norm", "mlp", "activation", "moe", "shared_experts", "mla_up"]


@dataclass(frozen=True, kw_only=True)
class RecomputeSpec:
    """Activation checkpointing: full recomputes entire layers in the backward pass, selective only some modules."""

    granularity: Literal["none", "full", "selective"] = setting(
        "none", "Recompute nothing, entire layers, or selected modules."
    )
    method: Literal["uniform", "block"] = setting(
        "uniform",
        "For full: recompute every chunk of num_layers (uniform), or only the first num_layers of a stage (block).",
    )
    num_layers: int = setting(1, "Layers per chunk (uniform) or per stage (block).", minimum=1)
    modules: tuple[RecomputeModule, ...] = setting(("attention",), "For selective: modules to recompute.")
    cpu_offloading_num_layers: int = setting(
        0, "Number of first layers of a stage whose activations are offloaded to host memory.", minimum=0
    )
