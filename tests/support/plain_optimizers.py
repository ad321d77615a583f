"""The optimizers of the engine for one process: torch's own where it has them, else the formulas of their papers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.schedule import ScheduleSpec


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
                weight *= 1 - group["lr"] * group["decoupled_decay"]
        super().step()


class PlainMuon(torch.optim.AdamW):
    """Muon with Nesterov momentum and Moonlight's scale, in fp32; AdamW for the groups without `muon`."""

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        for group in [group for group in self.param_groups if group.get("muon")]:
            for weight in group["params"]:
                buffer = self.state.setdefault(weight, {"m": torch.zeros_like(weight)})["m"]
                buffer.mul_(group["momentum"]).add_(weight.grad)
                direction = weight.grad + group["momentum"] * buffer
                scale = group["lr"] * 0.2 * max(weight.shape[-2:]) ** 0.5
                weight *= 1 - group["lr"] * group["weight_decay"]
                weight -= scale * _newton_schulz(direction)
                weight.grad = None  # AdamW skips it
        super().step()


def _newton_schulz(stack: torch.Tensor) -> torch.Tensor:
    """Five iterations of the polynomial of Jordan et al. on each matrix of a stack."""
    x = stack / stack.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        inner = x @ x.mT
        x = 3.4445 * x - 4.7750 * inner @ x + 2.0315 * inner @ inner @ x
    return x


def plain_optimizer(spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a spec over whole parameters, each a group with its `peak` learning rate."""
    groups = [_group(spec, name, parameter) for name, parameter in named.items()]
    if spec.name == "sgd":
        return DecoupledSGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, foreach=False)
    betas = (spec.beta1, spec.beta2)
    if spec.name == "lion":
        return PlainLion(groups, {"lr": spec.lr, "betas": betas})
    kind = PlainMuon if spec.name == "muon" else torch.optim.AdamW
    return kind(groups, lr=spec.lr, betas=betas, eps=spec.epsilon, foreach=False)


def set_weight_decay(group: dict[str, Any], schedule: ScheduleSpec, position: float) -> None:
    """Set the weight decay of a group that has one to what a growing one is at a position of the schedule."""
    key = "decoupled_decay" if "decoupled_decay" in group else "weight_decay"
    if schedule.weight_decay_incr_style == "constant" or group[key] == 0:
        return
    share = min(1.0, position / schedule.weight_decay_incr_steps)
    if schedule.weight_decay_incr_style == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    group[key] = (1 - share) * schedule.start_weight_decay + share * schedule.end_weight_decay


def _group(spec: OptimizerSpec, name: str, parameter: nn.Parameter) -> dict[str, object]:
    """What is particular to one parameter."""
    is_table = name in ("embedding.weight", "head.weight")
    is_qk_norm = ".q_norm." in name or ".k_norm." in name
    decay = spec.weight_decay if parameter.ndim > 1 or (is_qk_norm and spec.apply_wd_to_qk_layernorm) else 0.0
    hidden = parameter.ndim > 1 and not is_table and "router" not in name
    return {
        "params": [parameter],
        "decoupled_decay" if spec.name == "sgd" else "weight_decay": decay,
        "peak": spec.embedding_lr if is_table and spec.embedding_lr is not None else spec.lr,
        "muon": hidden,
        "momentum": spec.momentum,
    }
