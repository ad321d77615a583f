"""Share token counts, losses, norms, stop signals and errors between ranks, in one all-reduce per call.

The host waits for the device once per call, to read the result; for token counts it does not wait for the work that is
in progress there. Numbers of the host are written to the device by kernels: a copy from pageable memory would wait for
the stream too.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.run_end import RankError, RunEnd

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""The signals that end a run; of several received, the first of this order counts. SIGALRM: the time limit is over."""


@dataclass(frozen=True)
class StepReduction:
    """Values reduced over all ranks after the backward pass; `stop` is the signal that any rank received.

    `expert_sums` are those of `take_expert_sums`, over all ranks; None for a dense model. `expert_sums_on_host` are the
    same on the CPU. `mtp_losses` are those of MTP depths. `grad_norm` is the largest of `replica_norms`, the gradient
    norms of the replicas that train apart (`parallel.outer_steps`); without, the only one.
    """

    loss: float
    grad_norm: float
    stop: signal.Signals | None
    expert_sums: Tensor | None = None
    mtp_losses: tuple[float, ...] = ()
    expert_sums_on_host: Tensor | None = None
    replica_norms: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        """False when any rank's loss or gradient holds NaN or infinity."""
        return self.finite_losses and math.isfinite(self.grad_norm)

    @property
    def finite_losses(self) -> bool:
        """False when any rank's loss holds NaN or infinity."""
        return all(math.isfinite(number) for number in (self.loss, *self.mtp_losses))


def total_valid_tokens(
    mine: Sequence[int], problem: RankError | None, step: int, device: torch.device
) -> tuple[int, ...]:
    """All-reduce numbers of labels with a loss; raises a RunEnd on every rank if any has a problem.

    The problem count is part of the same all-reduce; the reasons are gathered only if it is not 0.

    The counts are known on the host, so this runs on a stream of its own: the host does not wait for the update of the
    step before, and the device has the next kernels when that ends. gloo would need no device, but takes 2 (ranks - 1)
    messages one after another.
    """
    with _side_stream(device):
        sums = _on_device([*mine, int(problem is not None)], torch.int64, device)
        dist.all_reduce(sums)
        *tokens, problems = sums.tolist()
    if problems:
        raise_on_all_ranks(problem, step)
    return tuple(tokens)


def reduce_step_stats(
    losses: Tensor, squared_norms: Tensor, received: signal.Signals | None, expert_sums: Tensor | None = None
) -> StepReduction:
    """All-reduce the ranks' losses, squared gradient norms, loads of experts and stop signals, in fp64.

    `losses` are the loss, and then those of MTP depths; `squared_norms` has one place for each replica that trains
    apart, and 0 in those of others; `expert_sums` are this rank's, of all layers.
    """
    losses = losses.detach().double().flatten()
    squared_norms = squared_norms.to(losses.device).view(-1)
    numbers = torch.cat((losses, squared_norms))
    shares = torch.cat((numbers, _on_device(_encode_stop_signal(received), torch.float64, losses.device)))
    counted = len(shares)
    if expert_sums is not None:
        shares = torch.cat((shares, expert_sums.flatten()))
    dist.all_reduce(shares)
    on_host = shares.cpu()
    total_loss, *others = on_host[:counted].tolist()
    mtp_losses, rest = others[: len(losses) - 1], others[len(losses) - 1 :]
    squares, votes = rest[: len(squared_norms)], rest[len(squared_norms) :]
    norms = tuple(map(math.sqrt, squares))
    reduction = StepReduction(
        total_loss,
        max(norms) if all(map(math.isfinite, norms)) else sum(norms),
        _decode_stop_signal(votes),
        mtp_losses=tuple(mtp_losses),
        replica_norms=norms,
    )
    if expert_sums is None:
        return reduction
    sums, host_sums = (each[counted:].view(expert_sums.shape) for each in (shares, on_host))
    return replace(reduction, expert_sums=sums, expert_sums_on_host=host_sums)


def sync_stop_signal(
    received: signal.Signals | None, problem: RankError | None, step: int, device: torch.device
) -> signal.Signals | None:
    """All-reduce stop signals; return the one that any rank received. Raises RunEnd on all if any has a problem."""
    shares = _on_device([float(problem is not None), *_encode_stop_signal(received)], torch.float64, device)
    dist.all_reduce(shares)
    problems, *votes = shares.tolist()
    if problems:
        raise_on_all_ranks(problem, step)
    return _decode_stop_signal(votes)


@cache
def _side_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the device computes on a stream of its own; one that does nothing on a CPU."""
    platform = platform_of(device)
    return platform.make_stream(device) if platform.has_streams else nullcontext()


def _on_device(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat([torch.full((1,), number, dtype=dtype, device=device) for number in numbers])


def _encode_stop_signal(received: signal.Signals | None) -> list[float]:
    return [float(received == each) for each in _STOP_SIGNALS]


def _decode_stop_signal(votes: list[float]) -> signal.Signals | None:
    return next((each for each, ranks in zip(_STOP_SIGNALS, votes, strict=True) if ranks), None)


def raise_on_all_ranks(problem: RankError | None, step: int) -> None:
    """Raise a RunEnd after `step` on every rank if any has a problem: that of the lowest such rank. Collective."""
    for shared in all_gather_objects(problem):
        if isinstance(shared, RankError):
            raise RunEnd(shared.exit_code, shared.reason, step)


def all_gather_objects(mine: object) -> list[object]:
    """All-gather one small object per rank, in rank order. For reports, not for the hot path."""
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def all_gather_numbers(device: torch.device, *mine: float) -> list[list[float]]:
    """All-gather numbers in fp32: return each number of all ranks, in rank order. The host waits for the device."""
    world = dist.get_world_size()
    gathered = torch.empty(world * len(mine), dtype=torch.float32, device=device)
    dist.all_gather_into_tensor(gathered, torch.tensor(mine, dtype=torch.float32, device=device))
    numbers: list[list[float]] = gathered.view(world, len(mine)).T.tolist()
    return numbers
