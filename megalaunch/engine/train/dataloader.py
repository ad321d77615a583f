"""Data loader: this rank's microbatches of each step, prefetched on a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalaunch.data.errors import DataError
from megalaunch.data.samples.sample import Dataset, Sample
from megalaunch.engine.mesh import Axis, Mesh
from megalaunch.engine.model.attention.documents import (
    DocumentLengths,
    concat_documents,
    derive_documents,
    document_lengths,
)
from megalaunch.engine.parallel.context_parallel import cp_positions
from megalaunch.engine.parallel.dynamic_context_parallel import local_token_indices
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.run_end import RankError
from megalaunch.engine.train.loss import IGNORE_INDEX
from megalaunch.engine.train.multi_token import shift_tokens
from megalaunch.plan.batch import samples_of_step
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec

_STEPS_AHEAD = 2
_TIMEOUT = 2.0  # seconds between reports of a wait for tokens


@dataclass(frozen=True)
class MicroBatch:
    """One microbatch on one rank, with its sequence shard under context parallelism.

    Attributes:
        tokens: Input token ids, int64 [B, S].
        labels: The next token of each input, int64 [B, S]; IGNORE_INDEX where the loss mask is False.
        positions: Position ids, int64 [B, S]; None: 0 to S - 1.
        documents: Document ids, int64 [B, S], which limit the attention mask to one document; None: no such limit.
            Under dynamic context parallelism every rank holds the document ids of the full samples.
        mtp_tokens: The tokens that each MTP depth embeds, int64 [B, D, S]; None: MTP depths do not run.
        mtp_labels: Their labels, int64 [B, D, S].
        last_positions: The last position of each sample, int64 [B, 1], of which a sequence shard has only a part; under
            dynamic context parallelism that of each token's sample, [B, S]. None: the microbatch has full samples.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    documents: Tensor | None = None
    mtp_tokens: Tensor | None = None
    mtp_labels: Tensor | None = None
    last_positions: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The inputs of a decoder by argument name; position ids are always included."""
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        given = {"tokens": self.tokens, "positions": positions}
        optional = {
            "documents_BS": self.documents,
            "mtp_tokens_BDS": self.mtp_tokens,
            "last_positions": self.last_positions,
        }
        return given | {name: value for name, value in optional.items() if value is not None}

    @property
    def all_labels(self) -> Tensor:
        """The labels of the decoder and of each MTP depth, [B, 1 + D, S]."""
        labels = self.labels.unsqueeze(1)
        return labels if self.mtp_labels is None else torch.cat((labels, self.mtp_labels), dim=1)

    @classmethod
    def concat(cls, parts: Sequence[MicroBatch]) -> MicroBatch:
        """Concatenate microbatches along the batch dim."""
        names = [field.name for field in fields(cls) if getattr(parts[0], field.name) is not None]
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        return cls(
            **{
                name: concat_documents(each) if name == "documents" else torch.cat(each)
                for name, each in columns.items()
            }
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy with `change` applied to every tensor."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = MicroBatch(**{name: change(part) for name, part in parts.items() if part is not None})
        if self.documents is not None and changed.documents is not None:
            derive_documents(changed.documents, self.documents)
        return changed

    def pin_for(self, device: torch.device) -> MicroBatch:
        """Return a copy in pinned memory if copies from there to the device are asynchronous, else the batch itself."""
        return self.map(Tensor.pin_memory) if platform_of(device).pins_host_memory else self

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device; pinned memory is copied while the host continues."""
        return self.map(lambda part: part.to(device, non_blocking=True))


@dataclass(frozen=True)
class StepBatch:
    """The M microbatches that one rank computes in one step.

    Attributes:
        indices: Sample indices of each microbatch.
        microbatches: The microbatches; empty if there is a problem.
        valid_tokens: Number of labels with a loss.
        mtp_valid_tokens: Their number for each MTP depth.
        problem: Why the batch could not be read; None if it was.
        data_time: Seconds that the training loop waited for this batch.
    """

    indices: tuple[range, ...]
    microbatches: tuple[MicroBatch, ...] = ()
    valid_tokens: int = 0
    mtp_valid_tokens: tuple[int, ...] = ()
    problem: RankError | None = None
    data_time: float = 0.0

    def pin_for(self, device: torch.device) -> StepBatch:
        """Return a copy in pinned memory as `MicroBatch.pin_for` does."""
        return replace(self, microbatches=tuple(microbatch.pin_for(device) for microbatch in self.microbatches))

    def to(self, device: torch.device) -> StepBatch:
        """Return a copy on a device; pinned memory is copied while the host continues."""
        return replace(self, microbatches=tuple(microbatch.to(device) for microbatch in self.microbatches))


@dataclass(frozen=True)
class BatchSampler:
    """Assignment of the samples of a global batch to data-parallel ranks.

    Microbatch m of rank r has the `micro_batch_size` samples from (m * data_size + r) * micro_batch_size on. With outer
    steps these are the samples and ranks of one replica: what it learns by itself must not depend on its layout.

    Attributes:
        step_samples: Takes the number of a step (from 1); returns its samples over all ranks.
        micro_batch_size: Samples of a microbatch.
        data_rank: The data-parallel rank.
        data_size: Number of data-parallel ranks.
        context: The context-parallel axis, which shards each sample.
        by_length: Dynamic context parallelism: partition the documents of a microbatch by length.
    """

    step_samples: Callable[[int], range]
    micro_batch_size: int
    data_rank: int
    data_size: int
    context: Axis = Axis("cp")
    by_length: bool = False

    def indices(self, step: int) -> tuple[range, ...]:
        """Return the sample indices of each of this rank's microbatches in `step` (from 1)."""
        samples, width = self.step_samples(step), self.micro_batch_size
        count = len(samples) // (width * self.data_size)
        firsts = (samples.start + (m * self.data_size + self.data_rank) * width for m in range(count))
        return tuple(range(first, first + width) for first in firsts)


def make_batch_sampler(spec: RunSpec, mesh: Mesh) -> BatchSampler:
    """Build the batch sampler of this rank, for a constant batch size or a rampup."""
    t, step_samples = mesh.topology, partial(samples_of_step, spec)
    data_size = t.gradient_group.dp
    return BatchSampler(
        partial(_samples_of_replica, step_samples, mesh.replicas) if t.outer_steps else step_samples,
        t.micro_batch_size,
        mesh.dp_rank % data_size,
        data_size,
        mesh.cp,
        t.dynamic_context_parallel,
    )


def _samples_of_replica(step_samples: Callable[[int], range], replicas: Axis, step: int) -> range:
    """Return the replica's part of the samples of a step; the parts follow each other."""
    samples = step_samples(step)
    count = len(samples) // replicas.size
    return samples[replicas.rank * count : (replicas.rank + 1) * count]


class PrefetchingDataLoader:
    """Loader that reads the batches of the next two steps on a background thread while step k is computed.

    Batches are a pure function of (dataset, sampler, step), so checkpoints store no loader state.

    Args:
        dataset: The training samples.
        sampler: Assignment of samples to this rank.
        device: Device of the returned tensors.
        waiting: Called every two seconds with the step's number while `get` waits for its batch.
        mtp_depths: Number of MTP depths.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: BatchSampler,
        device: torch.device,
        waiting: Callable[[int], None] = lambda step: None,
        mtp_depths: int = 0,
    ) -> None:
        self._dataset, self._sampler, self._device, self._waiting = dataset, sampler, device, waiting
        self._mtp_depths = mtp_depths
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[int, Future[StepBatch]] = {}

    def get(self, step: int, last: int) -> StepBatch:
        """Return this rank's batch of a step, on the device, and start reading the next ones.

        Args:
            step: Number of the step.
            last: Last step to read ahead. Later samples may never be needed, and samples past those requested cost a
                new shuffle of all documents.

        Raises:
            Exception: Errors of the reading thread. Unreadable data raises nothing: it is the batch's `problem`.
        """
        started = time.perf_counter()
        wanted = range(step, min(step + _STEPS_AHEAD, last) + 1)
        for number in [number for number in self._ahead if number not in wanted]:
            self._ahead.pop(number).cancel()
        for number in (step, *wanted):
            if number not in self._ahead:
                self._ahead[number] = self._reader.submit(self._read, number)
        batch = self._result(step)
        waited = time.perf_counter() - started
        return replace(batch.to(self._device), data_time=waited)

    def close(self) -> None:
        """Stop reading ahead and end the thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _result(self, step: int) -> StepBatch:
        future = self._ahead.pop(step)
        while True:
            try:
                return future.result(timeout=_TIMEOUT)
            except NotReady:
                if future.done():  # a TimeoutError raised by reading, not by this wait
                    raise
                self._waiting(step)

    def _read(self, step: int) -> StepBatch:
        indices = self._sampler.indices(step)
        try:
            groups = [[self._dataset[index] for index in group] for group in indices]
        except (DataError, OSError) as error:
            reason = f"the training tokens of step {step} cannot be read: {error}"
            return StepBatch(indices, problem=RankError(ExitCode.DATA, reason))
        return make_step_batch(self._sampler, indices, groups, self._mtp_depths).pin_for(self._device)


def make_step_batch(
    sampler: BatchSampler, indices: tuple[range, ...], groups: Sequence[Sequence[Sample]], mtp_depths: int = 0
) -> StepBatch:
    """Collate one rank's samples of a step on the CPU.

    Args:
        sampler: Says how the sequence of each sample is sharded.
        indices: Sample indices of each microbatch.
        groups: The samples of each microbatch.
        mtp_depths: Number of MTP depths.
    """
    microbatches = tuple(
        shard_for_context_parallel(collate(group, mtp_depths), sampler.context, sampler.by_length) for group in groups
    )
    counts = torch.stack([(m.all_labels != IGNORE_INDEX).sum((0, 2)) for m in microbatches]).sum(0)
    valid, *mtp_valid = counts.tolist()
    return StepBatch(indices, microbatches, valid, tuple(mtp_valid))


def collate(samples: Sequence[Sample], mtp_depths: int = 0) -> MicroBatch:
    """Collate samples of the same length into a microbatch on the CPU, with the tokens and labels of MTP depths."""
    stacked = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    tokens, labels = stacked[:, :-1].clone(), stacked[:, 1:].clone()  # `contiguous` of a single row would be a view
    for sample, label in zip(samples, labels, strict=True):
        if sample.loss_mask is not None:
            label[torch.from_numpy(~sample.loss_mask)] = IGNORE_INDEX
    positions = _stack([sample.positions for sample in samples], np.arange(tokens.shape[1]))
    documents = _stack([sample.document_ids for sample in samples], np.zeros(tokens.shape[1], np.int64))
    batch = MicroBatch(tokens, labels, positions, documents)
    if not mtp_depths:
        return batch
    mtp_tokens, mtp_labels = shift_tokens(tokens, labels, documents, mtp_depths)
    return replace(batch, mtp_tokens=mtp_tokens, mtp_labels=mtp_labels)


def shard_for_context_parallel(
    batch: MicroBatch, context: Axis, by_length: bool = False, lengths: DocumentLengths = document_lengths
) -> MicroBatch:
    """Return this rank's sequence shard of a microbatch; the batch itself at cp=1.

    Every rank gets S / cp tokens of each sample; `by_length` (dynamic context parallelism), as many tokens, chosen by a
    partition of the microbatch's documents by length. Inputs, labels and positions are sharded alike.
    """
    if context.size == 1:
        return batch
    placed = replace(batch, positions=batch.inputs["positions"])
    last = placed.inputs["positions"].amax(dim=-1, keepdim=True)
    if not by_length:
        local_positions = cp_positions(batch.tokens.shape[1], context)
        return replace(placed.map(lambda part: part[..., local_positions]), last_positions=last)
    placed = replace(placed, last_positions=last.expand_as(batch.tokens))
    documents = torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents
    tokens = local_token_indices(documents, context, lengths)
    return replace(replace(placed, documents=None).map(lambda part: part.flatten()[tokens]), documents=documents)


def _stack(parts: Sequence[npt.NDArray[np.int64] | None], otherwise: npt.NDArray[np.int64]) -> Tensor | None:
    """Stack rows to [B, S]; None if all are None, else `otherwise` [S] replaces those that are None."""
    if all(part is None for part in parts):
        return None
    return torch.from_numpy(np.stack([otherwise if part is None else part for part in parts]))
