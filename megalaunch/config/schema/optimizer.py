"""The `optimizer` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Decoupled weight decay; vectors (norms, biases) are not decayed."""

    name: Literal["adamw", "sgd", "lion", "muon"] = setting("adamw", "The update rule; muon: matrices, adamw the rest.")
    lr: float = setting(3e-4, "Peak learning rate.", minimum=0)
    embedding_lr: float | None = setting(None, "Peak rate of embedding and head; null: lr.", minimum=0)
    beta1: float = setting(0.9, "Decay of the first moment.", minimum=0)
    beta2: float = setting(0.95, "Decay of the second moment.", minimum=0)
    epsilon: float = setting(1e-8, "Added to the root of the second moment.", minimum=0)
    momentum: float = setting(0.95, "Of sgd and muon.", minimum=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay of matrices.", minimum=0)
    clip_grad: float = setting(1.0, "Largest gradient norm; 0: no clipping.", minimum=0)
    skip_step_grad_norm: float | None = setting(
        None, "Steps of a larger gradient norm change nothing; null: none.", minimum=0
    )
    optimizer_offload_fraction: float = setting(
        0.0, "Part of the states kept and updated in host memory.", minimum=0, maximum=1
    )
