"""What all ranks must know alike before weights change, each in one all-reduce."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Sums over all ranks after the backward pass; `stop` is the signal that any rank received."""

    loss: float
    grad_norm: float
    stop: signal.Signals | None

    @property
    def finite(self) -> bool:
        """False when any rank's loss or gradient holds NaN or infinity."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def total_valid_tokens(mine: int, unreadable: bool, device: torch.device) -> tuple[int, bool]:
    """Labels with a loss over all ranks, and whether any rank failed to read its batch."""
    both = torch.tensor([mine, int(unreadable)], dtype=torch.int64, device=device)
    dist.all_reduce(both)
    return int(both[0]), bool(both[1])


def agree(loss: Tensor, squared_norm: Tensor, received: signal.Signals | None) -> Verdict:
    """Sum the ranks' shares of the loss and of the squared gradient norm, and count their stop signals."""
    numbers = torch.stack((loss.detach().double(), squared_norm.to(loss.device)))
    shares = torch.cat((numbers, _ballot(received).to(loss.device)))
    dist.all_reduce(shares)
    total_loss, total_square, *votes = shares.tolist()
    return Verdict(total_loss, math.sqrt(total_square), _elected(votes))


def agree_to_stop(received: signal.Signals | None, device: torch.device) -> signal.Signals | None:
    """The signal that any rank received, on every rank."""
    votes = _ballot(received).to(device)
    dist.all_reduce(votes)
    return _elected(votes.tolist())


def _ballot(received: signal.Signals | None) -> Tensor:
    return torch.tensor([float(received == signal.SIGINT), float(received == signal.SIGTERM)], dtype=torch.float64)


def _elected(votes: list[float]) -> signal.Signals | None:
    interrupts, terminations = votes
    if interrupts:
        return signal.SIGINT
    return signal.SIGTERM if terminations else None


def gather_objects(mine: object) -> list[object]:
    """Every rank's small object, in rank order; for reports, never on the hot path."""
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
