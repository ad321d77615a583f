"""AdamW over named parameters, and its states under flat names for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megalaunch.config.schema.optimizer import OptimizerSpec
from megalaunch.engine.model.model_parts import ModelParts

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    """Fused AdamW; matrices are decayed, vectors (norms, biases) are not."""

    def __init__(self, model: ModelParts, spec: OptimizerSpec) -> None:
        self._parameters = dict(model.named_parameters())
        matrices = [p for p in self._parameters.values() if p.ndim >= 2]
        vectors = [p for p in self._parameters.values() if p.ndim < 2]
        self._adamw = AdamW(
            [
                {"params": matrices, "weight_decay": spec.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=spec.lr,
            betas=(spec.beta1, spec.beta2),
            eps=spec.epsilon,
            fused=True,
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the model's order."""
        return list(self._parameters.values())

    def step(self, learning_rate: float, divisor: float = 1.0) -> None:
        """One update with the gradients at hand over `divisor`, in the same pass; they are then dropped."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        # the fused update divides by what a scaler of losses would leave in this attribute
        self._adamw.grad_scale = torch.tensor(divisor) if divisor != 1 else None  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def states(self) -> dict[str, Tensor]:
        """Moments by flat name (`optimizer.exp_avg.<parameter>`), made as zeros before the first step."""
        flat: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter]
            if not state:
                state.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS}, step=_count(0, parameter))
            flat |= {f"optimizer.{moment}.{name}": state[moment] for moment in _MOMENTS}
        return flat

    def set_step(self, count: int) -> None:
        """Tell AdamW how many updates the moments have seen (its bias correction depends on it)."""
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"] = _count(count, parameter)


def _count(updates: int, parameter: Tensor) -> Tensor:
    """AdamW's own form of a step count: the fused update wants it on the parameter's device."""
    return torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
