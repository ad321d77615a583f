"""Forward and backward passes over a step's microbatches: the same two methods with and without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.config.schema.parallel import ParallelSpec
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.dropout import streams_of
from megalaunch.engine.model.parts import ModelParts
from megalaunch.engine.parallel.data import announce_microbatch, finish_microbatch, release
from megalaunch.engine.parallel.pipeline import Pipeline
from megalaunch.engine.parallel.relay import Relay
from megalaunch.engine.precision.policy import stream_format
from megalaunch.engine.train.batches import MicroBatch, StepBatch
from megalaunch.engine.train.head_loss import HeadLoss
from megalaunch.plan.stages import stages_of


class Passes(Protocol):
    """What a step and a validation call, on all ranks alike."""

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """Accumulate the gradients of all M microbatches; returns each one's share of the mean token loss, fp32 [M]."""

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """The summed token loss of one batch."""

    def release(self) -> None:
        """After a forward pass that no backward pass follows."""


def passes_of(spec: RunSpec, mesh: Mesh, model: ModelParts) -> Passes:
    """The passes of a laid-out model, or of this rank's stages of it."""
    if mesh.pp.size == 1:
        (decoder,) = model.parts
        return OneStage(decoder, spec.parallel, HeadLoss(decoder, spec.train.loss_chunks), spec.train.seed)
    loss = HeadLoss(model.parts[-1], spec.train.loss_chunks)
    pipeline = Pipeline(model, mesh, stages_of(spec), spec.parallel, loss)
    return PipelinedPasses(pipeline, relay_of(spec, mesh, model), model, mesh, loss, spec.train.seed)


def relay_of(spec: RunSpec, mesh: Mesh, model: ModelParts) -> Relay:
    """Forward passes through all stages of a laid-out model."""
    return Relay(model, mesh, stages_of(spec), stream_format(spec.precision))


@dataclass(frozen=True)
class OneStage:
    """Every rank of a group computes the whole decoder."""

    model: Decoder
    parallel: ParallelSpec
    loss: HeadLoss
    seed: int

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """One microbatch after the other."""
        losses = []
        for number, microbatch in enumerate(batch.microbatches, start=1):
            last = number == len(batch.microbatches)
            announce_microbatch(self.model, self.parallel, last)
            streams = _streams(self.model, self.seed, batch.indices[number - 1])
            loss = self._loss(microbatch, streams) / max(total_tokens, 1)
            torch.autograd.backward(loss)
            finish_microbatch(self.model, self.parallel, last)
            losses.append(loss.detach())
        return torch.stack(losses)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Forward only, when gradients are off."""
        return self._loss(batch, None)

    def _loss(self, batch: MicroBatch, streams_B: Tensor | None) -> Tensor:
        output = self.model(
            batch.tokens,
            batch.positions,
            documents_BS=batch.documents,
            logits=self.loss.of_logits,
            streams_B=streams_B,
        )
        return self.loss(output, batch.labels)

    def release(self) -> None:
        """Free gathered parameters."""
        release(self.model)


@dataclass(frozen=True)
class PipelinedPasses:
    """Microbatches flow through the stages; the loss is known on the last."""

    pipeline: Pipeline
    relay: Relay
    model: ModelParts
    mesh: Mesh
    loss: HeadLoss
    seed: int

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """By the schedule; zeros on all stages but the last."""
        joined = MicroBatch.joined(batch.microbatches)
        inputs: dict[str, Tensor | bool] = {**joined.inputs, "logits": self.loss.of_logits}
        streams = _streams(self.model.parts[0], self.seed, [index for indices in batch.indices for index in indices])
        if streams is not None:
            inputs["streams_B"] = streams
        losses = self.pipeline.train(inputs, joined.labels, len(batch.microbatches), max(total_tokens, 1))
        return torch.stack(losses) if losses else torch.zeros(len(batch.microbatches), device=self.mesh.device)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """One microbatch through all stages; zero on all but the last."""
        rest = {name: value for name, value in batch.inputs.items() if name != "tokens"}
        output = self.relay.run(batch.tokens, {**rest, "logits": self.loss.of_logits})
        return self.loss(output, batch.labels) if output is not None else torch.zeros((), device=self.mesh.device)

    def release(self) -> None:
        """Free gathered parameters."""
        for part in self.model.parts:
            release(part)


def _streams(model: Decoder, seed: int, samples: Sequence[int]) -> Tensor | None:
    """What dropout is drawn from in training, where the model has any."""
    return streams_of(seed, samples, model.device) if model.config.drops else None
