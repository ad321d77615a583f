"""A step's microbatches: this rank's share of data's pure order, read ahead on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.engine.mesh import Mesh


class Samples(Protocol):
    """What the training order offers: sample i as S + 1 token ids, and where they come from."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...

    def describe(self, index: int) -> str: ...


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and labels, [B, S] int64 each; a label of -100 has no loss."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class StepBatch:
    """Everything one rank computes in one step; `problem` says why it could not be read."""

    indices: tuple[int, ...]
    microbatches: tuple[MicroBatch, ...]
    problem: str | None = None

    @property
    def valid_tokens(self) -> int:
        """Labels that have a loss."""
        return sum(int((batch.labels >= 0).sum()) for batch in self.microbatches)


@dataclass(frozen=True)
class BatchShape:
    """How a global batch is dealt out: microbatch m of rank r is samples [(m * ranks + r) * size, ...)."""

    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def indices(self, step: int) -> list[range]:
        """The sample indices of each of this rank's microbatches in `step` (the first is 1)."""
        start, width = (step - 1) * self.global_batch_size, self.micro_batch_size
        count = self.global_batch_size // (width * self.data_size)
        firsts = (start + (m * self.data_size + self.data_rank) * width for m in range(count))
        return [range(first, first + width) for first in firsts]


def batch_shape(global_batch_size: int, mesh: Mesh) -> BatchShape:
    """This rank's share of every global batch."""
    return BatchShape(global_batch_size, mesh.topology.micro_batch_size, mesh.data_rank, mesh.data_size)


class TrainBatches:
    """Reads step k + 1 while step k is computed."""

    def __init__(self, samples: Samples, shape: BatchShape, device: torch.device) -> None:
        self._samples, self._shape, self._device = samples, shape, device
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[StepBatch]] | None = None

    def of(self, step: int) -> StepBatch:
        """This rank's part of step `step`, on the device."""
        if self._ahead is None or self._ahead[0] != step:
            self._ahead = (step, self._reader.submit(self._read, step))
        batch = self._ahead[1].result()
        self._ahead = (step + 1, self._reader.submit(self._read, step + 1))
        return StepBatch(
            batch.indices,
            tuple(
                MicroBatch(m.tokens.to(self._device, non_blocking=True), m.labels.to(self._device, non_blocking=True))
                for m in batch.microbatches
            ),
            batch.problem,
        )

    def close(self) -> None:
        """Stop reading ahead."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int) -> StepBatch:
        groups = self._shape.indices(step)
        flat = tuple(index for group in groups for index in group)
        try:
            rows = [self._samples[index] for index in flat]
        except DataError as error:
            return StepBatch(flat, (), str(error))
        except OSError as error:
            return StepBatch(flat, (), f"the training tokens could not be read: {error}")
        width = self._shape.micro_batch_size
        stacks = (rows[first : first + width] for first in range(0, len(rows), width))
        return StepBatch(flat, tuple(_microbatch(stack, self._device.type == "cuda") for stack in stacks))


def _microbatch(rows: Sequence[npt.NDArray[np.int64]], pin: bool) -> MicroBatch:
    stacked = torch.from_numpy(np.stack(rows))
    tokens, labels = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
    return MicroBatch(tokens.pin_memory(), labels.pin_memory()) if pin else MicroBatch(tokens, labels)
