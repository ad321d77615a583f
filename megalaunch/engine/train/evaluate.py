"""Validation loss: the mean over all tokens of the validation documents, each counted once.

Ranks wait for each other only once in several batches, to share stop signals and errors in reading: between two such
checks the stages of a pipeline work on consecutive batches at the same time. The batches up to the next check are read,
sharded and pinned on a background thread while those before it are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
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
    may_continue: Callable[[RankError | None], bool],
    heartbeat: Callable[[], None] = lambda: None,
) -> float | None:
    """Return the mean loss in nats per token; None if interrupted. Collective; arguments of `evaluate_loss_sum`."""
    sums = evaluate_loss_sum(forward_backward, dataset, batch_size, mesh, may_continue, heartbeat)
    return None if sums is None else float(sums[0] / sums[1])


@torch.no_grad()
def evaluate_loss_sum(
    forward_backward: ForwardBackward,
    dataset: FiniteDataset,
    batch_size: int,
    mesh: Mesh,
    may_continue: Callable[[RankError | None], bool],
    heartbeat: Callable[[], None] = lambda: None,
) -> Tensor | None:
    """Return the sum of all token losses in nats and the number of tokens, fp64 [2]; one all-reduce over the world.

    Every data-parallel rank runs the same number of batches, since each forward pass is collective: past the end of
    the data, batches are padded with rows whose loss mask is all False.

    Args:
        forward_backward: Forward passes of the model.
        dataset: Validation samples.
        batch_size: Rows of a batch on one data-parallel rank.
        mesh: The device mesh.
        may_continue: Called every `check_interval` batches with this rank's error in reading the rows of the next ones,
            if any. Must return the same value on all ranks, or raise on all; False interrupts the evaluation.
        heartbeat: Called after each batch that is read or launched; the host waits for those before a check.

    Returns:
        The two sums on every rank; None if interrupted.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # sum of losses, number of labels with a loss
    with closing(_read_ahead(dataset, batch_size, mesh, heartbeat)) as groups:
        for batches, problem in groups:
            if not may_continue(problem) or problem is not None:
                forward_backward.release()
                return None
            for on_host in batches:
                batch = on_host.to(mesh.device)
                sums[0] += forward_backward.evaluate(batch)
                sums[1] += (batch.labels != IGNORE_INDEX).sum()
                heartbeat()
    forward_backward.release()
    sums *= mesh.is_loss_rank  # tp ranks and stages of the same samples must not count them again
    dist.all_reduce(sums)
    return sums


def check_interval(pp_size: int) -> int:
    """Return after how many batches ranks check for stop signals and errors, and so for how many the host runs ahead.

    Stages are idle while a pipeline of pp stages fills and drains around a check, for pp - 1 batches: at this interval
    less than a fifth of the time. Without a pipeline there is nothing to fill.
    """
    return 4 * pp_size if pp_size > 1 else 1


def _read_ahead(
    dataset: FiniteDataset, batch_size: int, mesh: Mesh, heartbeat: Callable[[], None]
) -> Generator[tuple[list[MicroBatch], RankError | None], None, None]:
    """Yield the batches up to each check, on the host, with the first error in reading them; read the next ones ahead.

    Arguments of `evaluate_loss_sum`.
    """
    firsts = [start + mesh.dp_rank * batch_size for start in range(0, len(dataset), batch_size * mesh.dp_size)]
    interval = check_interval(mesh.pp.size)
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="validation batches")

    def start_reading(start: int) -> list[Future[MicroBatch | RankError]]:
        rows = (range(first, first + batch_size) for first in firsts[start : start + interval])
        return [reader.submit(_read, dataset, indices, mesh) for indices in rows]

    try:
        ahead = start_reading(0)
        for following in range(interval, len(firsts) + interval, interval):
            reading, ahead = ahead, start_reading(following)
            read = []
            for future in reading:
                read.append(future.result())
                heartbeat()
            problem = next((one for one in read if isinstance(one, RankError)), None)
            yield [one for one in read if isinstance(one, MicroBatch)], problem
    finally:
        reader.shutdown(wait=True, cancel_futures=True)


def _read(dataset: FiniteDataset, indices: range, mesh: Mesh) -> MicroBatch | RankError:
    """Return this rank's shard of the rows, or the error in reading them; rows past the end have no valid label."""
    read = []
    try:
        for index in indices:
            row = dataset[min(index, len(dataset) - 1)]
            past = index >= len(dataset)
            read.append(replace(row, loss_mask=np.zeros(len(row.tokens) - 1, np.bool_)) if past else row)
    except (DataError, OSError) as error:
        return RankError(ExitCode.DATA, f"the validation tokens cannot be read: {error}")
    batch = shard_for_context_parallel(collate(read), mesh.cp, mesh.topology.dynamic_context_parallel)
    return batch.pin_for(mesh.device)
