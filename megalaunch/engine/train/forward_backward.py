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
from megalaunch.engine.model.dropout import sample_seeds
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.parallel.fsdp import reduce_grads_if_due, reshard, set_grad_sync
from megalaunch.engine.parallel.pipeline_forward import PipelineForward
from megalaunch.engine.parallel.pipeline_parallel import Pipeline
from megalaunch.engine.precision.policy import residual_dtype
from megalaunch.engine.train.dataloader import MicroBatch, StepBatch
from megalaunch.engine.train.linear_cross_entropy import LinearCrossEntropy
from megalaunch.plan.stages import build_stages


class ForwardBackward(Protocol):
    """What a step and a validation call, on all ranks alike."""

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """Accumulate the gradients of all M microbatches; returns each one's share of the mean token loss, fp32 [M]."""

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """The summed token loss of one batch."""

    def release(self) -> None:
        """After a forward pass that no backward pass follows."""


def make_forward_backward(spec: RunSpec, mesh: Mesh, model: ModelParts) -> ForwardBackward:
    """The passes of a laid-out model, or of this rank's stages of it."""
    if mesh.pp.size == 1:
        (decoder,) = model.parts
        return SingleStage(decoder, spec.parallel, LinearCrossEntropy(decoder, spec.train.loss_chunks), spec.train.seed)
    loss = LinearCrossEntropy(model.parts[-1], spec.train.loss_chunks)
    pipeline = Pipeline(model, mesh, build_stages(spec), spec.parallel, loss)
    return PipelineForwardBackward(
        pipeline, make_pipeline_forward(spec, mesh, model), model, mesh, loss, spec.train.seed
    )


def make_pipeline_forward(spec: RunSpec, mesh: Mesh, model: ModelParts) -> PipelineForward:
    """Forward passes through all stages of a laid-out model."""
    return PipelineForward(model, mesh, build_stages(spec), residual_dtype(spec.precision))


@dataclass(frozen=True)
class SingleStage:
    """Every rank of a group computes the whole decoder."""

    model: Decoder
    parallel: ParallelSpec
    loss: LinearCrossEntropy
    seed: int

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """One microbatch after the other."""
        losses = []
        for number, microbatch in enumerate(batch.microbatches, start=1):
            last = number == len(batch.microbatches)
            set_grad_sync(self.model, self.parallel, last)
            seeds = _dropout_seeds(self.model, self.seed, batch.indices[number - 1])
            loss = self._loss(microbatch, seeds) / max(total_tokens, 1)
            torch.autograd.backward(loss)
            reduce_grads_if_due(self.model, self.parallel, last)
            losses.append(loss.detach())
        return torch.stack(losses)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Forward only, when gradients are off."""
        return self._loss(batch, None)

    def _loss(self, batch: MicroBatch, seeds_B: Tensor | None) -> Tensor:
        output = self.model(
            batch.tokens,
            batch.positions,
            documents_BS=batch.documents,
            logits=self.loss.takes_logits,
            seeds_B=seeds_B,
        )
        return self.loss(output, batch.labels)

    def release(self) -> None:
        """Free gathered parameters."""
        reshard(self.model)


@dataclass(frozen=True)
class PipelineForwardBackward:
    """Microbatches flow through the stages; the loss is known on the last."""

    pipeline: Pipeline
    relay: PipelineForward
    model: ModelParts
    mesh: Mesh
    loss: LinearCrossEntropy
    seed: int

    def train(self, batch: StepBatch, total_tokens: int) -> Tensor:
        """By the schedule; zeros on all stages but the last."""
        joined = MicroBatch.concat(batch.microbatches)
        inputs: dict[str, Tensor | bool] = {**joined.inputs, "logits": self.loss.takes_logits}
        seeds = _dropout_seeds(
            self.model.parts[0], self.seed, [index for indices in batch.indices for index in indices]
        )
        if seeds is not None:
            inputs["seeds_B"] = seeds
        losses = self.pipeline.train(inputs, joined.labels, len(batch.microbatches), max(total_tokens, 1))
        return torch.stack(losses) if losses else torch.zeros(len(batch.microbatches), device=self.mesh.device)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """One microbatch through all stages; zero on all but the last."""
        rest = {name: value for name, value in batch.inputs.items() if name != "tokens"}
        output = self.relay.run(batch.tokens, {**rest, "logits": self.loss.takes_logits})
        return self.loss(output, batch.labels) if output is not None else torch.zeros((), device=self.mesh.device)

    def release(self) -> None:
        """Free gathered parameters."""
        for part in self.model.parts:
            reshard(part)


def _dropout_seeds(model: Decoder, seed: int, samples: Sequence[int]) -> Tensor | None:
    """What dropout is drawn from in training, where the model has any."""
    return sample_seeds(seed, samples, model.device) if model.config.has_dropout else None
