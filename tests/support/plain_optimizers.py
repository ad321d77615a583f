"""The optimizers of the engine for one process: torch's own where it has them, else the formulas of their papers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megalaunch.schema.optimizer import OptimizerSpec


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023."""

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                state = self.state.setdefault(weight, {"m": torch.zeros_like(weight)})
                direction = (beta1 * state["m"] + (1 - beta1) * weight.grad).sign()
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                state["m"] = beta2 * state["m"] + (1 - beta2) * weight.grad


class DecoupledSGD(torch.optim.SGD):
    """torch's SGD, whose own weight decay is part of the gradient, with the decay of AdamW."""

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight *= 1 - group["lr"] * group["decay"]
        super().step()


def plain_optimizer(spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a spec over whole parameters."""
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    decay = "decay" if spec.name == "sgd" else "weight_decay"
    groups = [{"params": matrices, decay: spec.weight_decay}, {"params": vectors, decay: 0.0}]
    if spec.name == "sgd":
        return DecoupledSGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, foreach=False)
    betas = (spec.beta1, spec.beta2)
    if spec.name == "lion":
        return PlainLion(groups, {"lr": spec.lr, "betas": betas})
    return torch.optim.AdamW(groups, lr=spec.lr, betas=betas, eps=spec.epsilon, foreach=False)
