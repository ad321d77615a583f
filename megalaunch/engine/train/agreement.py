"""What all ranks must know alike before weights change, each in one all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Sums over all ranks after the backward pass."""

    loss: float
    grad_norm: float
    stop_votes: int

    @property
    def finite(self) -> bool:
        """False when any rank's loss or gradient holds NaN or infinity."""
        return bool(torch.isfinite(torch.tensor([self.loss, self.grad_norm])).all())


def total_valid_tokens(mine: int, unreadable: bool, device: torch.device) -> tuple[int, bool]:
    """Labels with a loss over all ranks, and whether any rank failed to read its batch."""
    both = torch.tensor([mine, int(unreadable)], dtype=torch.int64, device=device)
    dist.all_reduce(both)
    return int(both[0]), bool(both[1])


def agree(loss: Tensor, squared_norm: Tensor, wants_stop: bool) -> Verdict:
    """Sum the ranks' shares of the loss, the squared gradient norm and their wish to stop."""
    votes = torch.tensor(float(wants_stop), dtype=torch.float64, device=loss.device)
    shares = torch.stack((loss.detach().double(), squared_norm.to(loss.device), votes))
    dist.all_reduce(shares)
    total_loss, total_square, stop_votes = shares.tolist()
    return Verdict(total_loss, total_square**0.5 if total_square >= 0 else total_square, round(stop_votes))


def gather_objects(mine: object) -> list[object]:
    """Every rank's small object, in rank order; for reports, never on the hot path."""
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
