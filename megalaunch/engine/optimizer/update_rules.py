"""Update rules that are elementwise, so that each rank updates its local shards: AdamW, SGD and Lion.

With weight w, gradient g, learning rate lr and weight decay wd. The decay is decoupled: w is multiplied by 1 - lr * wd
before the update. Gradients arrive multiplied by a divisor, by which the rule divides them: clipping costs no pass.
Whatever the dtypes of weights, gradients and states, an update is computed in fp32 and rounded once, to the nearest.

AdamW: torch's fused kernel, or on a GPU ours where a tensor is not in fp32 (kernels/fused_update.py). Its states are
       exp_avg, exp_avg_sq and the number of updates.
SGD:   b = momentum * b + g;  w -= lr * b, or with Nesterov momentum lr * (g + momentum * b)
Lion:  w -= lr * sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g   (Chen et al. 2023); on a GPU
       by a kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.kernels.forms import UpdateKernels
from megalaunch.kernels.fused_update import update_kernels
from megalaunch.kernels.overridable import overridable
from megalaunch.plan.memory.model_states import UPDATE_PIECE
from megalaunch.schema.optimizer import OptimizerSpec


@dataclass(frozen=True)
class ParameterState:
    """The states of one parameter, sharded as it is, by name; and its number of updates, on its device."""

    tensors: Mapping[str, Tensor]
    updates: Tensor


@dataclass(frozen=True)
class Update:
    """One update of some parameters; lists are in the same order."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    states: Sequence[ParameterState]
    learning_rate: float
    weight_decay: float
    divisor: float

    @property
    def kernels(self) -> UpdateKernels | None:
        """The kernels that update many tensors at once, if the device has them."""
        return update_kernels(self._tensors)

    @property
    def is_fp32(self) -> bool:
        """Whether parameters, gradients and states are in fp32."""
        return all(tensor.dtype == torch.float32 for tensor in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        states = (tensor for state in self.states for tensor in state.tensors.values())
        return [*self.parameters, *self.gradients, *states]

    @property
    def scale(self) -> Tensor | None:
        """The divisor as torch's fused updates take it; None: 1. torch's GradScaler passes its loss scale so."""
        return torch.tensor(self.divisor) if self.divisor != 1 else None

    def shards(self, state: str | None = None) -> list[Tensor]:
        """Return this rank's shards of the parameters, or of one of their states."""
        owners = self.parameters if state is None else [one.tensors[state] for one in self.states]
        return [to_local_no_grad(tensor) for tensor in owners]

    def gradient_shards(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [to_local_no_grad(gradient) for gradient in self.gradients]


def apply_in_fp32(apply: Callable[[Update], None], update: Update) -> None:
    """Apply an elementwise update whose parameters, gradients and states may be in bf16, as if all were in fp32.

    Tensors in bf16 are copied to fp32 in pieces, so that the copies stay small, and rounded back after each piece.
    Every piece starts from the number of updates before this one.
    """
    if update.is_fp32:
        apply(update)
        return
    for parameter, gradient, state in zip(update.parameters, update.gradients, update.states, strict=True):
        stored = [to_local_no_grad(tensor).view(-1) for tensor in (parameter, *state.tensors.values())]
        of_gradient = to_local_no_grad(gradient).flatten()
        count = state.updates.clone()
        for pieces in zip(*(torch.split(tensor, UPDATE_PIECE) for tensor in (of_gradient, *stored)), strict=True):
            wide = [piece.float() for piece in pieces]
            states = ParameterState(dict(zip(state.tensors, wide[2:], strict=True)), state.updates.copy_(count))
            apply(replace(update, parameters=[wide[1]], gradients=[wide[0]], states=[states]))
            for piece, updated in zip(pieces[1:], wide[1:], strict=True):
                if updated is not piece:
                    piece.copy_(updated)
            del wide, states, updated  # freed before the next piece is copied


class UpdateRule(Protocol):
    """How parameters are updated, in place; `state_names` are the tensors that it keeps for each parameter."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the states, which begin as zeros."""

    def apply(self, update: Update) -> None:
        """Update parameters and states; gradients may be overwritten."""


@overridable
class AdamW:
    """Torch's fused AdamW on local shards.

    Called with DTensors, torch derives the sharding of every tensor of the fused update anew in each process: seconds
    in the first step.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, spec: OptimizerSpec) -> None:
        self._betas, self._epsilon = (spec.beta1, spec.beta2), spec.epsilon

    def apply(self, update: Update) -> None:
        """Update parameters and moments, and count the update."""
        if update.is_fp32 or (kernels := update.kernels) is None:
            apply_in_fp32(self._update, update)
            return
        kernels.adamw(
            update.shards(),
            update.gradient_shards(),
            update.shards("exp_avg"),
            update.shards("exp_avg_sq"),
            [state.updates for state in update.states],
            update.learning_rate,
            *self._betas,
            self._epsilon,
            update.weight_decay,
            update.divisor,
        )

    def _update(self, update: Update) -> None:
        """Call the fused kernel."""
        adamw(
            update.shards(),
            update.gradient_shards(),
            update.shards("exp_avg"),
            update.shards("exp_avg_sq"),
            [],
            [state.updates for state in update.states],
            fused=True,
            grad_scale=update.scale,
            amsgrad=False,
            maximize=False,
            lr=update.learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            eps=self._epsilon,
            weight_decay=update.weight_decay,
        )


class SGD:
    """Torch's fused SGD; without momentum it has no states."""

    def __init__(self, spec: OptimizerSpec) -> None:
        self._momentum, self._nesterov = spec.momentum, spec.nesterov

    @property
    def state_names(self) -> tuple[str, ...]:
        """The momentum, if there is one."""
        return ("momentum_buffer",) if self._momentum else ()

    def apply(self, update: Update) -> None:
        """Update parameters and momentum."""
        apply_in_fp32(self._update, update)

    def _update(self, update: Update) -> None:
        """Call the fused kernel."""
        parameters = update.shards()
        decay_weights(parameters, update)
        momentum: list[Tensor | None] = [None] * len(parameters)
        if self._momentum:
            momentum = list(update.shards("momentum_buffer"))
        sgd(
            parameters,
            update.gradient_shards(),
            momentum,
            fused=True,
            grad_scale=update.scale,
            weight_decay=0.0,  # torch's is part of the gradient
            momentum=self._momentum,
            lr=update.learning_rate,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
        )


class Lion:
    """Lion; without kernels one parameter after the other: its temporaries are as large as one shard."""

    state_names = ("exp_avg",)

    def __init__(self, spec: OptimizerSpec) -> None:
        self._beta1, self._beta2 = spec.beta1, spec.beta2

    def apply(self, update: Update) -> None:
        """Update parameters and moments."""
        kernels = update.kernels
        if kernels is None:
            apply_in_fp32(self._update, update)
            return
        kernels.lion(
            update.shards(),
            update.gradient_shards(),
            update.shards("exp_avg"),
            update.learning_rate,
            self._beta1,
            self._beta2,
            update.weight_decay,
            update.divisor,
        )

    def _update(self, update: Update) -> None:
        parameters = update.shards()
        decay_weights(parameters, update)
        for weight, gradient, moment in zip(
            parameters, update.gradient_shards(), update.shards("exp_avg"), strict=True
        ):
            gradient.div_(update.divisor)
            weight.sub_(torch.lerp(moment, gradient, 1 - self._beta1).sign_(), alpha=update.learning_rate)
            moment.lerp_(gradient, 1 - self._beta2)


def decay_weights(weights: list[Tensor], update: Update) -> None:
    """Apply the decoupled weight decay of an update to local shards."""
    for weight in weights if update.weight_decay else ():
        weight.mul_(1 - update.learning_rate * update.weight_decay)
