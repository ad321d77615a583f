"""One step of the engine with ledgers around it: the same on fake ranks and on real ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.data.row import DocumentBorders, Row
from megalaunch.engine.deep_plan.moment import Moment
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.train.batches import MicroBatch, StepBatch, microbatch, share
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.passes import Passes, passes_of
from megalaunch.engine.train.step import Step


@dataclass(frozen=True)
class Watched:
    """Passes that tell the moment when they begin and end."""

    passes: Passes
    moment: Moment

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """Forward and backward of all microbatches."""
        with self.moment.of("forward"):
            return self.passes.train(batch, total_tokens)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Forward only."""
        return self.passes.evaluate(batch)

    def release(self) -> None:
        """Free gathered parameters."""
        self.passes.release()


def whole_samples(documents_BS: Tensor) -> tuple[int, ...]:
    """The length of each row's only document, which a fake tensor does not tell (`dealt_context.run_lengths`)."""
    return (documents_BS.shape[1],) * documents_BS.shape[0]


class SameRow:
    """Samples that are all alike: sizes do not depend on words."""

    def __init__(self, spec: RunSpec) -> None:
        tokens = np.zeros(spec.batch.sequence_length + 1, np.int64)
        data = spec.data
        borders = DocumentBorders(-1, data.reset_positions, data.reset_attention, data.mask_eod_loss)
        self._row = borders.row(tokens)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Row:
        return self._row

    def describe(self, index: int) -> str:
        """Nobody asks: every loss is finite."""
        return f"sample {index}"


def watched_step(spec: RunSpec, mesh: Mesh, model: ModelParts, optimizer: NamedAdamW, moment: Moment) -> Step:
    """The engine's step on a model that is laid out and has memory."""
    passes = Watched(passes_of(spec, mesh, model), moment)
    return Step(spec, mesh, model, passes, optimizer, SameRow(spec))


def batch_of(spec: RunSpec, mesh: Mesh, microbatches: int) -> StepBatch:
    """So many microbatches of this rank, on the CPU."""
    size = mesh.topology.micro_batch_size
    one = share(microbatch([SameRow(spec)[0]] * size), mesh.cp, mesh.topology.cp_dynamic)
    indices = tuple(range(number * size, (number + 1) * size) for number in range(microbatches))
    return StepBatch(indices, (one,) * microbatches, microbatches * one.labels.numel())
