"""The `optimizer` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Optimizer and gradient clipping. Weight decay is decoupled and skips vectors (norms, biases)."""

    name: Literal["adamw", "sgd", "lion", "muon"] = setting(
        "adamw", "Optimizer; muon: for matrices, with adamw for the rest."
    )
    lr: float = setting(3e-4, "Peak learning rate.", minimum=0)
    embedding_lr: float | None = setting(None, "Peak learning rate of embedding and head; null: lr.", minimum=0)
    beta1: float = setting(0.9, "Decay rate of the first moment.", minimum=0)
    beta2: float = setting(0.95, "Decay rate of the second moment.", minimum=0)
    epsilon: float = setting(1e-8, "Added to the square root of the second moment.", minimum=0)
    momentum: float = setting(0.95, "Momentum of sgd and muon.", minimum=0)
    nesterov: bool = setting(False, "Use Nesterov momentum in sgd.")
    weight_decay: float = setting(0.1, "Coefficient of the decoupled weight decay of matrices.", minimum=0)
    clip_grad: float = setting(1.0, "Clip gradients to this global norm; 0: no clipping.", minimum=0)
    skip_step_grad_norm: float | None = setting(
        None, "Skip the update of steps whose gradient norm exceeds this; null: skip none.", minimum=0
    )
    optimizer_offload_fraction: float = setting(
        0.0, "Fraction of the optimizer states stored and updated in host memory.", minimum=0, maximum=1
    )
