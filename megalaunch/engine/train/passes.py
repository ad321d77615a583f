"""Forward and backward passes over a step's microbatches: the same two methods with and without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.parallel import DataSharding
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.data import announce_microbatch, release
from megalaunch.engine.parallel.pipeline import Pipeline, PipelineLoss
from megalaunch.engine.train.batches import MicroBatch, StepBatch
from megalaunch.engine.train.loss import summed_token_loss


class Passes(Protocol):
    """What a step and a validation call, on all ranks alike."""

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """Accumulate the gradients of all M microbatches; returns each one's share of the mean token loss, fp32 [M]."""

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """The summed token loss of one batch."""

    def release(self) -> None:
        """After a forward pass that no backward pass follows."""


def passes_of(spec: RunSpec, mesh: Mesh, model: Decoder) -> Passes:
    """The passes of a laid-out model, or of this rank's stage of it."""
    if mesh.pp.size == 1:
        return OneStage(model, spec.parallel.data_sharding)
    return PipelinedPasses(Pipeline(model, mesh, spec.parallel.schedule, _loss_of(model)), mesh)


@dataclass(frozen=True)
class OneStage:
    """Every rank of a group computes the whole decoder."""

    model: Decoder
    sharding: DataSharding

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """One microbatch after the other."""
        losses = []
        for number, microbatch in enumerate(batch.microbatches, start=1):
            announce_microbatch(self.model, self.sharding, last=number == len(batch.microbatches))
            loss = self.evaluate(microbatch) / max(total_tokens, 1)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Forward only, when gradients are off."""
        logits = self.model(batch.tokens, batch.positions, documents_BS=batch.documents)
        return summed_token_loss(logits, batch.labels, self.model.boundary.vocabulary)

    def release(self) -> None:
        """Free gathered parameters."""
        release(self.model)


@dataclass(frozen=True)
class PipelinedPasses:
    """Microbatches flow through the stages; the loss is known on the last."""

    pipeline: Pipeline
    mesh: Mesh

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """By the schedule; zeros on all stages but the last."""
        joined = MicroBatch.joined(batch.microbatches)
        losses = self.pipeline.train(joined.inputs, joined.labels, len(batch.microbatches), max(total_tokens, 1))
        return torch.stack(losses) if losses else torch.zeros(len(batch.microbatches), device=self.mesh.device)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """One microbatch through all stages; zero on all but the last."""
        losses = self.pipeline.evaluate(batch.inputs, batch.labels)
        return losses[0] if losses else torch.zeros((), device=self.mesh.device)

    def release(self) -> None:
        """Free gathered parameters."""
        release(self.pipeline.model)


def _loss_of(model: Decoder) -> PipelineLoss:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return summed_token_loss(logits, labels, model.boundary.vocabulary)

    return loss
