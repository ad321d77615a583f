"""AdamW over named parameters, with its states under flat names for checkpoints, and the learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.schedule import ScheduleSpec

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _State:
    """The moments of one parameter, sharded as it is, and its number of updates."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class NamedAdamW:
    """Fused AdamW on this rank's shards.

    Weight decay applies to matrices, not to vectors (norms, biases) and the biases of experts.

    The update is elementwise, so each rank updates its local tensors. Called with DTensors, torch derives the sharding
    of every tensor of the fused update anew in each process: seconds in the first step.
    """

    def __init__(self, model: ModelParts, spec: OptimizerSpec) -> None:
        self._betas, self._epsilon, self._weight_decay = (spec.beta1, spec.beta2), spec.epsilon, spec.weight_decay
        self._parameters = dict(model.named_parameters())
        self._states: dict[str, _State] = {}
        named = self._parameters.items()
        self._decayed = [name for name, p in named if p.ndim >= 2 and not name.endswith(".bias")]
        self._undecayed = [name for name, p in named if p.ndim < 2 or name.endswith(".bias")]

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
        # torch's GradScaler passes its loss scale so; any divisor will do
        scale = torch.tensor(divisor) if divisor != 1 else None
        self._update(self._decayed, learning_rate, self._weight_decay, scale)
        self._update(self._undecayed, learning_rate, 0.0, scale)
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _update(self, names: list[str], learning_rate: float, weight_decay: float, scale: Tensor | None) -> None:
        """Update the named parameters that have a gradient."""
        trained = [name for name in names if self._parameters[name].grad is not None]
        parameters, states = [self._parameters[name] for name in trained], [self._state(name) for name in trained]
        adamw(
            [to_local_no_grad(parameter) for parameter in parameters],
            [to_local_no_grad(parameter.grad) for parameter in parameters if parameter.grad is not None],
            [to_local_no_grad(state.exp_avg) for state in states],
            [to_local_no_grad(state.exp_avg_sq) for state in states],
            [],
            [state.step for state in states],
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            maximize=False,
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            eps=self._epsilon,
            weight_decay=weight_decay,
        )

    def states(self) -> dict[str, Tensor]:
        """Return the moments by flat name (`optimizer.exp_avg.<parameter>`); zeros before the first step."""
        return {
            f"optimizer.{moment}.{name}": getattr(self._state(name), moment)
            for name in self._parameters
            for moment in _MOMENTS
        }

    def set_step(self, count: int) -> None:
        """Set AdamW's number of updates so far, on which its bias correction depends."""
        for name in self._parameters:
            self._state(name).step.fill_(count)

    def _state(self, name: str) -> _State:
        """Return the state of a parameter; made when first asked for, as its memory is not needed before."""
        if name not in self._states:
            parameter = self._parameters[name]
            # the fused update requires the count on the parameter's device
            count = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in _MOMENTS}
            self._states[name] = _State(**moments, step=count)
        return self._states[name]


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
