"""AdamW over named parameters, with its states under flat names for checkpoints, and the learning rate schedule."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.schedule import ScheduleSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    """Fused AdamW. Weight decay applies to matrices, not to vectors (norms, biases) and the biases of experts."""

    def __init__(self, model: ModelParts, spec: OptimizerSpec) -> None:
        self._parameters = dict(model.named_parameters())
        matrices = [p for name, p in self._parameters.items() if p.ndim >= 2 and not name.endswith(".bias")]
        vectors = [p for name, p in self._parameters.items() if p.ndim < 2 or name.endswith(".bias")]
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
        """All parameters, in the order of the model."""
        return list(self._parameters.values())

    def step(self, learning_rate: float, divisor: float = 1.0) -> None:
        """Update the parameters with gradients / divisor, then drop the gradients.

        Args:
            learning_rate: Learning rate of this update.
            divisor: Gradients are divided by it inside the fused update, which saves a pass over them (clipping).
        """
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        # the fused update divides gradients by this attribute, which torch's GradScaler sets for loss scaling
        self._adamw.grad_scale = torch.tensor(divisor) if divisor != 1 else None  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def states(self) -> dict[str, Tensor]:
        """Return the moments by flat name (`optimizer.exp_avg.<parameter>`); zeros before the first step."""
        flat: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            state = self._adamw.state[parameter]
            if not state:
                state.update({moment: torch.zeros_like(parameter) for moment in _MOMENTS}, step=_count(0, parameter))
            flat |= {f"optimizer.{moment}.{name}": state[moment] for moment in _MOMENTS}
        return flat

    def set_step(self, count: int) -> None:
        """Set AdamW's number of updates so far, on which its bias correction depends."""
        for parameter in self._parameters.values():
            self._adamw.state[parameter]["step"] = _count(count, parameter)


def _count(updates: int, parameter: Tensor) -> Tensor:
    """Return a step count as AdamW stores it; the fused update requires it on the parameter's device."""
    return torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)


def learning_rate(schedule: ScheduleSpec, peak: float, step: int) -> float:
    """Return the learning rate of one update.

    Linear warmup to `peak`, then the schedule's shape down to `schedule.min_lr`. Formulas: Megatron-LM's
    optimizer_param_scheduler, with t = step.

    Args:
        schedule: The schedule; `decay_steps` must be resolved.
        peak: The learning rate after warmup.
        step: Number of the update, from 1.

    Raises:
        ValueError: `schedule.decay_steps` is null.
    """
    horizon, warmup, floor = schedule.decay_steps, schedule.warmup_steps or 0, schedule.min_lr or 0.0
    if horizon is None:
        raise ValueError("schedule.decay_steps is still null: the launcher resolves it before workers start")
    if warmup > 0 and step <= warmup:
        return peak * step / warmup
    if schedule.shape == "constant":
        return peak
    if step > horizon:
        return floor
    if schedule.shape == "inverse_square_root":
        return max(floor, peak * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
    if schedule.shape == "wsd":
        return floor + _wsd_decay_factor(schedule, horizon, step) * (peak - floor)
    progress = (step - warmup) / (horizon - warmup)
    share = 1 - progress if schedule.shape == "linear" else (math.cos(math.pi * progress) + 1) / 2
    return floor + share * (peak - floor)


def _wsd_decay_factor(schedule: ScheduleSpec, horizon: int, step: int) -> float:
    """Return the factor of the warmup-stable-decay schedule: 1 in the stable phase, then down to 0."""
    length = schedule.wsd_decay_steps or 0
    start = horizon - length
    if step <= start:
        return 1.0
    progress = (step - start) / length
    if schedule.wsd_decay_shape == "linear":
        return 1 - progress
    if schedule.wsd_decay_shape == "cosine":
        return (math.cos(math.pi * progress) + 1) / 2
    if schedule.wsd_decay_shape == "exponential":
        return 2 * 0.5**progress - 1
    return 1 - math.sqrt(progress)
