"""`LossKernels` in plain torch, by their formulas: for tests of what surrounds the kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalaunch.kernels.forms import LossKernels


def _capped(logits: Tensor, used: int, cap: float | None) -> Tensor:
    z = logits.float() if cap is None else cap * torch.tanh(logits.float() / cap)
    z[:, used:] = -math.inf
    return z


def _sums(logits: Tensor, columns: Tensor, used: int, cap: float | None) -> Tensor:
    z = _capped(logits.clone(), used, cap)
    largest = z.amax(1)
    own = (z - largest[:, None]).exp().sum(1) if used else torch.zeros_like(largest)
    return torch.stack((largest, own, z.gather(1, columns.clamp(min=0)[:, None])[:, 0].where(columns >= 0, 0)))


def _write_gradient(
    logits: Tensor, columns: Tensor, log_sums: Tensor, d_losses: Tensor, used: int, cap: float | None
) -> None:
    z = _capped(logits.clone(), used, cap)
    is_label = torch.arange(z.shape[1]) == columns[:, None]
    gradient = ((z - log_sums[:, None]).exp() - is_label.float()) * d_losses[:, None]
    logits.copy_(gradient if cap is None else gradient * (1 - (z / cap).clamp(-1, 1) ** 2))


def _loss_and_gradient(logits: Tensor, columns: Tensor, used: int, cap: float | None) -> Tensor:
    largest, total, label = _sums(logits, columns, used, cap)
    log_sums, counted = largest + total.log(), (columns >= 0).float()
    _write_gradient(logits, columns, log_sums, counted, used, cap)
    return (log_sums - label) * counted


PLAIN = LossKernels(_sums, _write_gradient, _loss_and_gradient)
