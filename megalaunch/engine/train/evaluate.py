"""The validation loss: the mean over every token of the validation documents, counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.engine.ending import Problem
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.data import release
from megalaunch.engine.train.loss import IGNORED, summed_token_loss
from megalaunch.rundir.outcome import ExitCode


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
    may_go_on: Callable[[Problem | None], bool],
) -> float | None:
    """Mean loss in nats per token, or None when it was cut short. Collective.

    Every rank computes equally many batches, the last ones without a label that counts if need be. Before each,
    `may_go_on` hears whether this rank could read its rows; it has to answer alike on all ranks (or raise).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of the losses, of the labels that count
    for start in range(0, len(rows), rows_at_once * mesh.data_size):
        first = start + mesh.data_rank * rows_at_once
        batch, problem = _read(rows, range(first, first + rows_at_once))
        if not may_go_on(problem) or batch is None:
            release(model)
            return None
        tokens, labels = (part.to(mesh.device) for part in batch)
        sums[0] += summed_token_loss(model(tokens), labels)
        sums[1] += (labels != IGNORED).sum()
    release(model)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _read(rows: ValidationRows, indices: range) -> tuple[tuple[Tensor, Tensor] | None, Problem | None]:
    """Inputs and labels, [B, S] int64 each, or why they cannot be read; past the end no label counts."""
    tokens, labels = [], []
    try:
        for index in indices:
            row, valid = rows[min(index, len(rows) - 1)]
            tokens.append(row[:-1])
            labels.append(np.where(valid & (index < len(rows)), row[1:], IGNORED))
    except (DataError, OSError) as error:
        return None, Problem(ExitCode.DATA, f"the validation tokens cannot be read: {error}")
    return (torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels))), None
