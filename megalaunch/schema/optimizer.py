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
    nesterov: bool = setting(False, "Use Nesterov momentum in sgd and muon.")
    muon_num_ns_steps: int = setting(5, "Newton-Schulz iterations that orthogonalize a matrix.", minimum=1, maximum=99)
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = setting(
        "spectral",
        "Scale of muon's lr for a matrix: spectral sqrt(max(out, in)); shape_scaling sqrt(max(1, out / in)); "
        "unit_rms_norm sqrt(out / in).",
    )
    muon_extra_scale_factor: float = setting(
        0.2, "Factor of that scale; 0.2 with spectral: updates as large as AdamW's (Moonlight).", minimum=0
    )
    weight_decay: float = setting(0.1, "Coefficient of the decoupled weight decay of matrices.", minimum=0)
    apply_wd_to_qk_layernorm: bool = setting(False, "Apply weight decay to the weights of QK norms, too.")
    clip_grad: float = setting(1.0, "Clip gradients to this global norm; 0: no clipping.", minimum=0)
    skip_step_grad_norm: float | None = setting(
        None, "Skip the update of steps whose gradient norm exceeds this; null: skip none.", minimum=0
    )
    optimizer_offload_fraction: float = setting(
        0.0, "Fraction of the optimizer states stored and updated in host memory.", minimum=0, maximum=1
    )
