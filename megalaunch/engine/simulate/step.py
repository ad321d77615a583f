"""Build one step of the engine that reports its phases and runs on constant data; simulated and real ranks use it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.data.samples.sample import EodPolicy, Sample
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.simulate.phase_tracker import PhaseTracker
from megalaunch.engine.train.dataloader import MicroBatch, StepBatch, microbatch, shard_for_context_parallel
from megalaunch.engine.train.forward_backward import ForwardBackward, make_forward_backward
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.train_step import TrainStep


@dataclass(frozen=True)
class InstrumentedForwardBackward:
    """Forward and backward passes that report the forward phase to a `PhaseTracker`."""

    passes: ForwardBackward
    moment: PhaseTracker

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """Run forward and backward of all microbatches."""
        with self.moment.phase_scope("forward"):
            return self.passes.train(batch, total_tokens)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Run forward only."""
        return self.passes.evaluate(batch)

    def release(self) -> None:
        """Free gathered parameters."""
        self.passes.release()


def full_length_documents(documents_BS: Tensor) -> tuple[int, ...]:
    """Return S for each row: one document a row. Replaces `dynamic_context_parallel.document_lengths`.

    The original reads document ids, which fake tensors do not have.
    """
    return (documents_BS.shape[1],) * documents_BS.shape[0]


class ConstantDataset:
    """A dataset of one constant sample: memory and communication do not depend on token ids."""

    def __init__(self, spec: RunSpec) -> None:
        tokens = np.zeros(spec.batch.sequence_length + 1, np.int64)
        data = spec.data
        borders = EodPolicy(-1, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
        self._row = borders.make_sample(tokens)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Sample:
        return self._row

    def describe(self, index: int) -> str:
        """Return the description that is printed for a non-finite loss, which does not occur here."""
        return f"sample {index}"


def run_instrumented_step(
    spec: RunSpec, mesh: Mesh, model: ModelParts, optimizer: NamedAdamW, moment: PhaseTracker
) -> TrainStep:
    """Return the engine's train step for a parallelized, materialized model. It is not run yet."""
    passes = InstrumentedForwardBackward(make_forward_backward(spec, mesh, model), moment)
    return TrainStep(spec, mesh, model, passes, optimizer, ConstantDataset(spec))


def make_batch(spec: RunSpec, mesh: Mesh, microbatches: int) -> StepBatch:
    """Return a batch of `microbatches` constant microbatches of this rank, on the CPU."""
    size = mesh.topology.micro_batch_size
    one = shard_for_context_parallel(
        microbatch([ConstantDataset(spec)[0]] * size), mesh.cp, mesh.topology.dynamic_context_parallel
    )
    indices = tuple(range(number * size, (number + 1) * size) for number in range(microbatches))
    return StepBatch(indices, (one,) * microbatches, microbatches * one.labels.numel())
