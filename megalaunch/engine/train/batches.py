"""A step's microbatches: this rank's share of data's pure order, read ahead on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.engine.ending import Problem
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.train.loss import IGNORED
from megalaunch.rundir.outcome import ExitCode


class Samples(Protocol):
    """What the training order offers: sample i as S + 1 token ids, and where they come from."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and labels, [B, S] int64 each; an IGNORED label has no loss."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class StepBatch:
    """Everything one rank computes in one step: M microbatches and their samples' indices.

    `valid_tokens` counts the labels that have a loss. `problem` says why the batch could not be read.
    """

    indices: tuple[range, ...]
    microbatches: tuple[MicroBatch, ...] = ()
    valid_tokens: int = 0
    problem: Problem | None = None


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is dealt out: microbatch m of rank r is samples [(m * ranks + r) * size, ...)."""

    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def indices(self, step: int) -> tuple[range, ...]:
        """The sample indices of each of this rank's microbatches in `step` (the first is 1)."""
        start, width = (step - 1) * self.global_batch_size, self.micro_batch_size
        count = self.global_batch_size // (width * self.data_size)
        firsts = (start + (m * self.data_size + self.data_rank) * width for m in range(count))
        return tuple(range(first, first + width) for first in firsts)


def batch_shape(global_batch_size: int, mesh: Mesh) -> BatchShape:
    """This rank's share of every global batch."""
    return BatchShape(global_batch_size, mesh.topology.micro_batch_size, mesh.data_rank, mesh.data_size)


class TrainBatches:
    """Reads step k + 1 while step k is computed."""

    def __init__(self, samples: Samples, shape: BatchShape, device: torch.device) -> None:
        self._samples, self._shape, self._device = samples, shape, device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def of(self, step: int, last: int) -> StepBatch:
        """This rank's part of step `step`, on the device. Nothing is read past step `last`: it may never be wanted,
        and samples past those requested cost a shuffle of all documents.
        """
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._reader.submit(self._read, step))
        batch = self._ahead[1].result()
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1)) if step < last else None
        return replace(batch, microbatches=tuple(self._on_device(microbatch) for microbatch in batch.microbatches))

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _on_device(self, batch: MicroBatch) -> MicroBatch:
        return MicroBatch(
            batch.tokens.to(self._device, non_blocking=True), batch.labels.to(self._device, non_blocking=True)
        )

    def _read(self, step: int) -> StepBatch:
        indices = self._shape.indices(step)
        try:
            rows = [[self._samples[index] for index in group] for group in indices]
        except (DataError, OSError) as error:
            reason = f"the training tokens of step {step} cannot be read: {error}"
            return StepBatch(indices, problem=Problem(ExitCode.DATA, reason))
        microbatches = tuple(_microbatch(group, pin=self._device.type == "cuda") for group in rows)
        return StepBatch(indices, microbatches, sum(int((m.labels != IGNORED).sum()) for m in microbatches))


def _microbatch(rows: Sequence[npt.NDArray[np.int64]], pin: bool) -> MicroBatch:
    stacked = torch.from_numpy(np.stack(rows))
    tokens, labels = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
    return MicroBatch(tokens.pin_memory(), labels.pin_memory()) if pin else MicroBatch(tokens, labels)
