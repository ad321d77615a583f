"""The load of a layer's experts during a step, and its summary over layers for metrics.

Shapes: E experts, L layers with experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalaunch.engine.model.moe.balancing import RouterLosses
from megalaunch.engine.torch_private import is_in_backward

_NUMBERS = 4  # router probability, dropped pairs, balance loss and z-loss, behind the counts


class ExpertLoad:
    """Since the last `take`: sums over this rank's tokens, and its parts of the router's losses.

    Tokens are counted twice: by the experts that they are sent to, and by those of their best scores. Whether all
    logits were finite is known until the next step records its first microbatch.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._sums: Tensor | None = None
        self._finite: Tensor | None = None

    def record(
        self,
        logits_TE: Tensor,
        counts_BE: Tensor,
        best_BE: Tensor,
        losses: RouterLosses,
        probability: Tensor,
        dropped: Tensor,
        microbatches: int | Tensor,
    ) -> None:
        """Add one microbatch; recomputation in the backward pass and evaluation add nothing.

        `counts_BE` are those before any were dropped, `probability` is the sum of `router_probability`.
        """
        if is_in_backward() or not torch.is_grad_enabled():
            return
        numbers = torch.stack((losses.balance, losses.z)).detach().double() / microbatches
        counts = torch.cat((counts_BE.sum(0), best_BE.sum(0))).double()
        sums = torch.cat((counts, torch.stack((probability, dropped)).double(), numbers))
        finite = logits_TE.detach().isfinite().all()
        self._finite = finite if self._sums is None or self._finite is None else self._finite & finite
        self._sums = sums if self._sums is None else self._sums + sums

    def is_finite(self) -> bool:
        """Return False if a logit of the step was not finite. Waits for the device."""
        return self._finite is None or bool(self._finite)

    def forget(self) -> None:
        """Start again from 0."""
        self._sums = None

    def take(self, device: torch.device) -> Tensor:
        """Return the sums, fp64 [2 E + 4], and start again from 0."""
        sums = self._sums
        self.forget()
        return torch.zeros(num_sums(self._num_experts), dtype=torch.float64, device=device) if sums is None else sums


def forget_load(model: nn.Module) -> None:
    """Forget the load of every layer of a model, after a forward pass that was no microbatch of a step."""
    for module in model.modules():
        load = getattr(module, "load", None)
        if isinstance(load, ExpertLoad):
            load.forget()


@dataclass(frozen=True)
class ExpertStats:
    """A step's load of experts and router losses, over all ranks.

    Attributes:
        balance_loss: The auxiliary loss, summed over layers; mean over microbatches.
        z_loss: The z-loss, likewise.
        load_max: Per layer with experts: tokens of the most loaded expert over the mean.
        load_entropy: Per layer: the entropy of the load over that of an even load, 0 to 1.
        router_probability: Per layer: the share of a token's scores that its experts have, mean over tokens.
        dropped: Per layer: the share of pairs of a token and an expert that full experts dropped, 0 to 1.
    """

    balance_loss: float
    z_loss: float
    load_max: list[float]
    load_entropy: list[float]
    router_probability: list[float]
    dropped: list[float]

    @classmethod
    def from_sums(cls, sums_LE: Tensor, top_k: int) -> ExpertStats:
        """Summarize the layers' sums [L, 2 E + 4] over all ranks, on the CPU; `top_k`: experts of a token."""
        counts_LE, (probability_L, dropped_L, balance_L, z_L) = expert_counts(sums_LE), sums_LE[:, -_NUMBERS:].unbind(1)
        pairs_L = counts_LE.sum(1).clamp(min=1)
        shares_LE = counts_LE / pairs_L[:, None]
        experts = shares_LE.shape[1]
        entropy_L = -torch.xlogy(shares_LE, shares_LE).sum(1) / max(math.log(experts), 1e-9)
        return cls(
            balance_loss=balance_L.sum().item(),
            z_loss=z_L.sum().item(),
            load_max=(shares_LE.amax(1) * experts).tolist(),
            load_entropy=entropy_L.tolist(),
            router_probability=(probability_L / pairs_L * top_k).tolist(),
            dropped=(dropped_L / pairs_L).tolist(),
        )


def expert_counts(sums_LE: Tensor) -> Tensor:
    """Return the tokens that are sent to each expert, [L, E], of the layers' sums [L, 2 E + 4]."""
    return sums_LE[:, : (sums_LE.shape[1] - _NUMBERS) // 2]


def best_counts(sums_LE: Tensor) -> Tensor:
    """Return the tokens that have each expert among their best scores, [L, E], of the layers' sums [L, 2 E + 4]."""
    return sums_LE[:, (sums_LE.shape[1] - _NUMBERS) // 2 : -_NUMBERS]


def num_sums(num_experts: int) -> int:
    """Return the number of a layer's sums, 2 E + 4."""
    return 2 * num_experts + _NUMBERS
