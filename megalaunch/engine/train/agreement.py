"""What all ranks must know alike before weights change, each in one all-reduce."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.ending import Ending, Problem


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


def total_valid_tokens(mine: int, problem: Problem | None, step: int, device: torch.device) -> int:
    """Labels with a loss over all ranks; raises an Ending on every rank when any has a problem."""
    sums = torch.tensor([mine, int(problem is not None)], dtype=torch.int64, device=device)
    dist.all_reduce(sums)
    tokens, problems = sums.tolist()
    if problems:
        end_together(problem, step)
    return int(tokens)


def agree(loss: Tensor, squared_norm: Tensor, received: signal.Signals | None) -> Verdict:
    """Sum the ranks' shares of the loss and of the squared gradient norm, and count their stop signals."""
    numbers = torch.stack((loss.detach().double(), squared_norm.to(loss.device)))
    shares = torch.cat((numbers, _ballot(received).to(loss.device)))
    dist.all_reduce(shares)
    total_loss, total_square, *votes = shares.tolist()
    return Verdict(total_loss, math.sqrt(total_square), _elected(votes))


def agree_to_stop(
    received: signal.Signals | None, problem: Problem | None, step: int, device: torch.device
) -> signal.Signals | None:
    """The signal that any rank received, on every rank; raises an Ending on every rank when any has a problem."""
    trouble = torch.tensor([float(problem is not None)], dtype=torch.float64)
    shares = torch.cat((trouble, _ballot(received))).to(device)
    dist.all_reduce(shares)
    problems, *votes = shares.tolist()
    if problems:
        end_together(problem, step)
    return _elected(votes)


def _ballot(received: signal.Signals | None) -> Tensor:
    return torch.tensor([float(received == signal.SIGINT), float(received == signal.SIGTERM)], dtype=torch.float64)


def _elected(votes: list[float]) -> signal.Signals | None:
    interrupts, terminations = votes
    if interrupts:
        return signal.SIGINT
    return signal.SIGTERM if terminations else None


def end_together(problem: Problem | None, step: int) -> None:
    """Raise an Ending after `step` on every rank when any has a problem: the lowest such rank's. Collective."""
    for found in gather_objects(problem):
        if isinstance(found, Problem):
            raise Ending(found.exit_code, found.reason, step)


def gather_objects(mine: object) -> list[object]:
    """Every rank's small object, in rank order; for reports, never on the hot path."""
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
