"""The `model.mtp` section: multi-token prediction (DeepSeek-V3)."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class MultiTokenSpec:
    """Multi-token prediction: extra blocks after the decoder, each predicting one token further ahead."""

    num_layers: int = setting(0, "Number of multi-token prediction blocks.", minimum=0, maximum=1000)
    loss_coeff: float = setting(0.1, "Coefficient of their mean loss.", minimum=0)
