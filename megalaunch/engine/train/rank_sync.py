"""What all ranks must know alike before weights change, each in one all-reduce."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.run_end import RankError, RunEnd


@dataclass(frozen=True)
class StepReduction:
    """Sums over all ranks after the backward pass; `stop` is the signal that any rank received."""

    loss: float
    grad_norm: float
    stop: signal.Signals | None

    @property
    def finite(self) -> bool:
        """False when any rank's loss or gradient holds NaN or infinity."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def total_valid_tokens(mine: int, problem: RankError | None, step: int, device: torch.device) -> int:
    """Labels with a loss over all ranks; raises a RunEnd on every rank when any has a problem."""
    sums = torch.tensor([mine, int(problem is not None)], dtype=torch.int64, device=device)
    dist.all_reduce(sums)
    tokens, problems = sums.tolist()
    if problems:
        raise_on_all_ranks(problem, step)
    return int(tokens)


def reduce_step_stats(loss: Tensor, squared_norm: Tensor, received: signal.Signals | None) -> StepReduction:
    """Sum the ranks' shares of the loss and of the squared gradient norm, and count their stop signals."""
    numbers = torch.stack((loss.detach().double(), squared_norm.to(loss.device)))
    shares = torch.cat((numbers, _encode_stop_signal(received).to(loss.device)))
    dist.all_reduce(shares)
    total_loss, total_square, *votes = shares.tolist()
    return StepReduction(total_loss, math.sqrt(total_square), _decode_stop_signal(votes))


def sync_stop_signal(
    received: signal.Signals | None, problem: RankError | None, step: int, device: torch.device
) -> signal.Signals | None:
    """The signal that any rank received, on every rank; raises a RunEnd on every rank when any has a problem."""
    trouble = torch.tensor([float(problem is not None)], dtype=torch.float64)
    shares = torch.cat((trouble, _encode_stop_signal(received))).to(device)
    dist.all_reduce(shares)
    problems, *votes = shares.tolist()
    if problems:
        raise_on_all_ranks(problem, step)
    return _decode_stop_signal(votes)


def _encode_stop_signal(received: signal.Signals | None) -> Tensor:
    return torch.tensor([float(received == signal.SIGINT), float(received == signal.SIGTERM)], dtype=torch.float64)


def _decode_stop_signal(votes: list[float]) -> signal.Signals | None:
    interrupts, terminations = votes
    if interrupts:
        return signal.SIGINT
    return signal.SIGTERM if terminations else None


def raise_on_all_ranks(problem: RankError | None, step: int) -> None:
    """Raise a RunEnd after `step` on every rank when any has a problem: the lowest such rank's. Collective."""
    for found in all_gather_objects(problem):
        if isinstance(found, RankError):
            raise RunEnd(found.exit_code, found.reason, step)


def all_gather_objects(mine: object) -> list[object]:
    """Every rank's small object, in rank order; for reports, never on the hot path."""
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
