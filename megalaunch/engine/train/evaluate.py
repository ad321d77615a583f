"""The validation loss: the mean over every token of the validation documents, counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.validation_samples import FiniteRows
from megalaunch.engine.ending import Problem
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.train.batches import MicroBatch, microbatch, share
from megalaunch.engine.train.loss import IGNORED
from megalaunch.engine.train.passes import Passes
from megalaunch.rundir.outcome import ExitCode


def validation_loss(
    passes: Passes,
    rows: FiniteRows,
    rows_at_once: int,
    mesh: Mesh,
    may_go_on: Callable[[Problem | None], bool],
) -> float | None:
    """Mean loss in nats per token, or None when it was cut short. Collective; the arguments of `summed_loss`."""
    sums = summed_loss(passes, rows, rows_at_once, mesh, may_go_on)
    return None if sums is None else float(sums[0] / sums[1])


@torch.no_grad()
def summed_loss(
    passes: Passes,
    rows: FiniteRows,
    rows_at_once: int,
    mesh: Mesh,
    may_go_on: Callable[[Problem | None], bool],
) -> Tensor | None:
    """The sum of all token losses in nats, and how many they are, fp64 [2]; None when it was cut short. Collective.

    Every rank computes equally many batches, the last ones without a label that counts if need be. Before each,
    `may_go_on` hears whether this rank could read its rows; it has to answer alike on all ranks (or raise).
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of the losses, of the labels that count
    for start in range(0, len(rows), rows_at_once * mesh.data_size):
        first = start + mesh.data_rank * rows_at_once
        batch, problem = _read(rows, range(first, first + rows_at_once))
        if not may_go_on(problem) or batch is None:
            passes.release()
            return None
        batch = share(batch, mesh.cp, mesh.topology.cp_dynamic).map(lambda part: part.to(mesh.device))
        sums[0] += passes.evaluate(batch)
        sums[1] += (batch.labels != IGNORED).sum()
    passes.release()
    sums *= mesh.speaks
    dist.all_reduce(sums)
    return sums


def _read(rows: FiniteRows, indices: range) -> tuple[MicroBatch | None, Problem | None]:
    """The rows as a batch, or why they cannot be read; past the end no label counts."""
    read = []
    try:
        for index in indices:
            row = rows[min(index, len(rows) - 1)]
            past = index >= len(rows)
            read.append(replace(row, counted=np.zeros(len(row.tokens) - 1, np.bool_)) if past else row)
    except (DataError, OSError) as error:
        return None, Problem(ExitCode.DATA, f"the validation tokens cannot be read: {error}")
    return microbatch(read), None
