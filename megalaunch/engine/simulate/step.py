"""Build one step of the engine on constant data, for simulated and real ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from megalaunch.data.samples.sample import EodPolicy, Sample
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.expert_parallel import RowCounts
from megalaunch.engine.parallel.pipeline_stage import StageActivations
from megalaunch.engine.parallel.step_observer import StepObserver
from megalaunch.engine.train.dataloader import StepBatch, collate, shard_for_context_parallel
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.plan.expert_rows import ExpertRows
from megalaunch.schema import RunSpec


def full_length_documents(documents_BS: Tensor) -> tuple[int, ...]:
    """Return S for each row: one document a row, whatever the document ids, which fake tensors do not have."""
    return (documents_BS.shape[1],) * documents_BS.shape[0]


def busiest_row_counts(spec: RunSpec) -> RowCounts:
    """Return what reads row counts for the busiest rank: fake tensors do not say how many there are.

    It splits the given total evenly, times the planned imbalance for received rows: all vectors but the first of
    several.
    """
    rows = ExpertRows.from_spec(spec)
    imbalance = rows.arriving / rows.sent / (spec.parallel.etp or 1)

    def split(counts: Sequence[Tensor], total: int) -> list[list[int]]:
        received = round(total * imbalance)
        totals = [received] if len(counts) == 1 else [total, *[received] * (len(counts) - 1)]
        return [_even_parts(each, vector.numel()) for each, vector in zip(totals, counts, strict=True)]

    return split


def _even_parts(total: int, parts: int) -> list[int]:
    each, rest = divmod(total, parts)
    return [each + (part < rest) for part in range(parts)]


class ConstantDataset:
    """A dataset of one constant sample: memory and communication do not depend on token ids."""

    def __init__(self, spec: RunSpec) -> None:
        tokens = np.zeros(spec.batch.sequence_length + 1, np.int64)
        data = spec.data
        policy = EodPolicy(-1, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        self._sample = policy.make_sample(tokens)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return self._sample

    def describe(self, index: int) -> str:
        """Return the description that is printed for a non-finite loss, which does not occur here."""
        return f"sample {index}"


def make_observed_step(
    spec: RunSpec,
    mesh: Mesh,
    model: ModelParts,
    optimizer: Optimizer,
    observer: StepObserver,
    activations: Sequence[StageActivations] | None = None,
) -> TrainStep:
    """Return the engine's train step for a parallelized, materialized model, on constant data. It is not run yet."""
    forward_backward = make_forward_backward(spec, mesh, model, observer, activations)
    return TrainStep(spec, mesh, model, forward_backward, optimizer, ConstantDataset(spec), observer)


def make_batch(spec: RunSpec, mesh: Mesh, microbatches: int) -> StepBatch:
    """Return a batch of `microbatches` constant microbatches of this rank, on the CPU."""
    size = mesh.topology.micro_batch_size
    one = shard_for_context_parallel(
        collate([ConstantDataset(spec)[0]] * size, spec.model.mtp.num_layers),
        mesh.cp,
        mesh.topology.dynamic_context_parallel,
        full_length_documents,
    )
    indices = tuple(range(number * size, (number + 1) * size) for number in range(microbatches))
    tokens = microbatches * one.labels.numel()
    return StepBatch(indices, (one,) * microbatches, tokens, (tokens,) * spec.model.mtp.num_layers)
