"""The `optimizer` section."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """AdamW with decoupled weight decay; vectors (norms, biases) are not decayed."""

    lr: float = setting(3e-4, "Peak learning rate.", minimum=0)
    beta1: float = setting(0.9, "Decay of the first moment.", minimum=0)
    beta2: float = setting(0.95, "Decay of the second moment.", minimum=0)
    epsilon: float = setting(1e-8, "Added to the root of the second moment.", minimum=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay of matrices.", minimum=0)
    clip_grad: float = setting(1.0, "Largest gradient norm; 0: no clipping.", minimum=0)
