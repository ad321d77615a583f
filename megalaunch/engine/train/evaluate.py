"""The validation loss: the mean over every token of the validation documents, counted once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.data import release
from megalaunch.engine.train.agreement import agree_to_stop
from megalaunch.engine.train.loss import IGNORED, summed_token_loss


class ValidationRows(Protocol):
    """Row i: S + 1 token ids, and which of the S labels count."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]: ...


@torch.no_grad()
def validation_loss(
    model: Decoder,
    rows: ValidationRows,
    rows_at_once: int,
    mesh: Mesh,
    received: Callable[[], signal.Signals | None],
) -> float | signal.Signals:
    """Mean loss in nats per token, or the stop signal that a rank received meanwhile.

    Every rank computes equally many batches, the last ones empty if need be.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    stride = rows_at_once * mesh.data_size
    stop = None
    for start in range(0, len(rows), stride):
        first = start + mesh.data_rank * rows_at_once
        tokens, labels = _batch(rows, range(first, first + rows_at_once))
        logits = model(tokens.to(mesh.device))
        sums[0] += summed_token_loss(logits, labels.to(mesh.device))
        sums[1] += (labels != IGNORED).sum().item()
        stop = agree_to_stop(received(), mesh.device)
        if stop is not None:
            break
    release(model)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]) if stop is None else stop


def _batch(rows: ValidationRows, indices: range) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = [], []
    for index in indices:
        row, valid = rows[min(index, len(rows) - 1)]
        tokens.append(row[:-1])
        labels.append(np.where(valid & (index < len(rows)), row[1:], IGNORED))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels))
