"""Validation loss: the mean over all tokens of the validation documents, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.samples.validation_dataset import FiniteDataset
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.dataloader import MicroBatch, collate, shard_for_context_parallel
from megalaunch.engine.train.forward_backward import ForwardBackward
from megalaunch.engine.train.loss import IGNORE_INDEX
from megalaunch.rundir.outcome import ExitCode


def validation_loss(
    forward_backward: ForwardBackward,
    dataset: FiniteDataset,
    batch_size: int,
    mesh: Mesh,
    may_go_on: Callable[[RankError | None], bool],
) -> float | None:
    """Return the mean loss in nats per token; None if interrupted. Collective; arguments of `evaluate_loss_sum`."""
    sums = evaluate_loss_sum(forward_backward, dataset, batch_size, mesh, may_go_on)
    return None if sums is None else float(sums[0] / sums[1])


@torch.no_grad()
def evaluate_loss_sum(
    forward_backward: ForwardBackward,
    dataset: FiniteDataset,
    batch_size: int,
    mesh: Mesh,
    may_go_on: Callable[[RankError | None], bool],
) -> Tensor | None:
    """Return the sum of all token losses in nats and the number of tokens, fp64 [2]; one all-reduce over the world.

    Every data-parallel rank runs the same number of batches, since each forward pass is collective: past the end of
    the data, batches are padded with rows whose loss mask is all False.

    Args:
        passes: Forward passes of the model.
        dataset: Validation samples.
        batch_size: Rows of a batch on one data-parallel rank.
        mesh: The device mesh.
        may_go_on: Called before each batch with this rank's error in reading its rows, if any. Must return the same
            value on all ranks, or raise on all; False interrupts the evaluation.

    Returns:
        The two sums on every rank; None if interrupted.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, number of labels with a loss
    for start in range(0, len(dataset), batch_size * mesh.dp_size):
        first = start + mesh.dp_rank * batch_size
        batch, problem = _read(dataset, range(first, first + batch_size))
        if not may_go_on(problem) or batch is None:
            forward_backward.release()
            return None
        batch = shard_for_context_parallel(batch, mesh.cp, mesh.topology.dynamic_context_parallel).map(
            lambda part: part.to(mesh.device)
        )
        sums[0] += forward_backward.evaluate(batch)
        sums[1] += (batch.labels != IGNORE_INDEX).sum()
    forward_backward.release()
    sums *= mesh.is_loss_rank  # tp ranks and stages of the same samples must not count them again
    dist.all_reduce(sums)
    return sums


def _read(dataset: FiniteDataset, indices: range) -> tuple[MicroBatch | None, RankError | None]:
    """Return the rows as a batch, or the error in reading them. Rows past the end have no label with a loss."""
    read = []
    try:
        for index in indices:
            row = dataset[min(index, len(dataset) - 1)]
            past = index >= len(dataset)
            read.append(replace(row, loss_mask=np.zeros(len(row.tokens) - 1, np.bool_)) if past else row)
    except (DataError, OSError) as error:
        return None, RankError(ExitCode.DATA, f"the validation tokens cannot be read: {error}")
    return collate(read), None
