"""Forward and backward passes over a step's microbatches, with gradient accumulation; with and without a pipeline.

Gradient accumulation: each data-parallel rank computes its part of a global batch as M microbatches,
M = global_batch_size / (dp * micro_batch_size), fewer during a batch size rampup. The gradients of the M backward
passes are added up before the one optimizer step. Each loss is divided by the step's global number of valid tokens
before backward, so the sum over microbatches, data-parallel and context-parallel ranks is the gradient of the mean
token loss: nothing is divided by M or by dp afterwards.

Reduction over the FSDP mesh (dp and cp ranks), by `parallel.data_sharding` (`engine/parallel/fsdp.py`, `ZERO_STAGES`):

- `no_shard` and `optim`: gradients accumulate unsharded, and are reduced once a step, with the last microbatch.
- `optim_grads` and `optim_grads_params`: reduced with every microbatch; the sharded gradients accumulate. This takes
  less memory for gradients, and M times as many reduce-scatters.

The reduction is a reduce-scatter over the shard axis, followed by an all-reduce over the replicas (`dp_replicate`;
under `no_shard` all data-parallel ranks are replicas). The all-reduce runs once a step, whatever the strategy, and
never with `parallel.outer_steps`. With `parallel.overlap_grad_reduce` the reduction overlaps with the backward pass;
without it, it runs after the pass.
A pipeline reduces the gradients of each stage once a step, after the stage's last backward pass, whatever the strategy.
Gradients that are partial over tp or pipeline stages are summed later, by `finalize_grads`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.dropout import sample_seeds
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.router import Router
from megalaunch.engine.parallel.fsdp import reduce_grads_if_due, reshard, set_grad_sync
from megalaunch.engine.parallel.layer_graphs import capture_layers
from megalaunch.engine.parallel.pipeline_forward import PipelineForward
from megalaunch.engine.parallel.pipeline_parallel import Pipeline
from megalaunch.engine.parallel.pipeline_stage import INFERS_ACTIVATIONS, StageActivations
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.engine.precision.policy import residual_dtype
from megalaunch.engine.train.dataloader import MicroBatch, StepBatch
from megalaunch.engine.train.loss import LinearCrossEntropy
from megalaunch.engine.train.multi_token import TrainingLoss
from megalaunch.plan.memory.loss_chunks import count_loss_chunks
from megalaunch.plan.stages import build_stages
from megalaunch.plan.topology import Topology
from megalaunch.schema import RunSpec
from megalaunch.schema.parallel import ParallelSpec


class ForwardBackward(Protocol):
    """The forward and backward passes of a training step and of a validation. Every method is collective."""

    def train(self, batch: StepBatch, total_tokens: float, mtp_tokens: Sequence[float] = ()) -> Tensor:
        """Accumulate the gradients of all M microbatches.

        Args:
            batch: This rank's microbatches.
            total_tokens: Labels with a loss in the global batch; every loss is divided by it before backward.
            mtp_tokens: Their number for each MTP depth, whose loss is divided by it.

        Returns:
            Each microbatch's contribution to the mean token loss and to those of D MTP depths, fp32 [M, 1 + D]. With a
            pipeline, zeros on all stages but the last.
        """

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return the summed token loss of one batch; with a pipeline, zero on all stages but the last."""

    def release(self) -> None:
        """Free gathered parameters. Call after a forward pass that no backward pass follows."""

    def set_loss_scale(self, scale: float) -> None:
        """Multiply the losses of the next steps by `scale` for backward, those of routers too; results are unscaled."""

    def set_microbatches(self, count: int) -> None:
        """Average the losses of routers over `count` microbatches of the next steps' global batches."""


def make_forward_backward(
    spec: RunSpec,
    mesh: Mesh,
    model: ModelParts,
    observer: StepObserver = NO_OBSERVER,
    activations: Sequence[StageActivations] | None = None,
) -> ForwardBackward:
    """Build the forward and backward passes of a parallelized model, or of this rank's pipeline stages.

    Args:
        spec: The run spec.
        mesh: The device mesh.
        model: The parallelized model.
        observer: Gets the phases of a pipeline's steps.
        activations: What each pipeline stage sends to the next one; None: inferred in the first step, where torch can.
    """
    loss = TrainingLoss(LinearCrossEntropy(model.parts[-1], count_loss_chunks(spec)), spec.model.mtp.loss_coeff)
    if mesh.pp.size == 1:
        (decoder,) = model.parts
        if spec.train.cuda_graphs and observer is NO_OBSERVER:  # a simulation has nothing to capture
            capture_layers(decoder)
        return SingleStage(decoder, spec.parallel, loss, spec.train.seed)
    if activations is None and not INFERS_ACTIVATIONS:
        activations = stage_activations(spec, mesh.topology)
    pipeline = Pipeline(model, mesh, build_stages(spec), spec.parallel, loss, observer, activations)
    return PipelineForwardBackward(
        pipeline, make_pipeline_forward(spec, mesh, model), model, mesh, loss, spec.train.seed
    )


def stage_activations(spec: RunSpec, topology: Topology) -> list[StageActivations]:
    """Return the activations that each pipeline stage sends to the next one, [B, s, H]; with MTP depths more rows."""
    parts = topology.cp * (topology.tp if spec.parallel.sequence_parallel else 1)
    length, dtype = spec.batch.sequence_length // parts, residual_dtype(spec.precision)
    return [
        StageActivations((topology.micro_batch_size * (1 + len(stage.mtp)), length, spec.model.hidden_size), dtype)
        for stage in build_stages(spec)
    ]


def make_pipeline_forward(spec: RunSpec, mesh: Mesh, model: ModelParts) -> PipelineForward:
    """Build the forward-only passes through all stages of a parallelized model."""
    return PipelineForward(model, mesh, build_stages(spec), residual_dtype(spec.precision))


@dataclass(frozen=True)
class SingleStage:
    """Passes without a pipeline: this rank runs every layer of the decoder."""

    model: Decoder
    parallel: ParallelSpec
    loss: TrainingLoss
    seed: int

    def train(self, batch: StepBatch, total_tokens: float, mtp_tokens: Sequence[float] = ()) -> Tensor:
        """Run forward and backward of one microbatch after the other; reduce gradients when they are due."""
        losses = []
        for number, microbatch in enumerate(batch.microbatches, start=1):
            last = number == len(batch.microbatches)
            set_grad_sync(self.model, self.parallel, last)
            seeds = _dropout_seeds(self.model, self.seed, batch.indices[number - 1])
            output = self._forward(microbatch, seeds, self.loss.takes_logits)
            loss, parts = self.loss(output, microbatch.all_labels, (total_tokens, *mtp_tokens))
            del output  # the loss frees it
            torch.autograd.backward(loss)
            reduce_grads_if_due(self.model, self.parallel, last)
            losses.append(parts)
        return torch.stack(losses)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Return the summed token loss of one batch. The caller disables gradients."""
        token_loss = self.loss.token_loss
        return token_loss(self._forward(batch, None, token_loss.takes_logits), batch.labels)

    def _forward(self, batch: MicroBatch, seeds_B: Tensor | None, logits: bool) -> Tensor:
        output: Tensor = self.model(
            batch.tokens,
            batch.positions,
            documents_BS=batch.documents,
            logits=logits,
            seeds_B=seeds_B,
            mtp_tokens_BDS=batch.mtp_tokens,
            last_positions=batch.last_positions,
        )
        return output

    def release(self) -> None:
        """Free the parameters that the forward pass gathered."""
        reshard(self.model)

    def set_loss_scale(self, scale: float) -> None:
        """Scale the training loss, and the auxiliary losses of routers."""
        self.loss.scale = scale
        _scale_router_losses([self.model], scale)

    def set_microbatches(self, count: int) -> None:
        """Set the microbatches of a step in every router."""
        _set_router_microbatches([self.model], count)


@dataclass(frozen=True)
class PipelineForwardBackward:
    """Passes with a pipeline: microbatches are sent from stage to stage; the last stage computes the loss."""

    pipeline: Pipeline
    forward_only: PipelineForward
    model: ModelParts
    mesh: Mesh
    loss: TrainingLoss
    seed: int

    def train(self, batch: StepBatch, total_tokens: float, mtp_tokens: Sequence[float] = ()) -> Tensor:
        """Run all microbatches by the pipeline schedule; returns zeros on all stages but the last."""
        joined = MicroBatch.concat(batch.microbatches)
        inputs: dict[str, Tensor | bool] = {**joined.inputs, "logits": self.loss.takes_logits}
        seeds = _dropout_seeds(
            self.model.parts[0], self.seed, [index for indices in batch.indices for index in indices]
        )
        if seeds is not None:
            inputs["seeds_B"] = seeds
        totals, microbatches = (total_tokens, *mtp_tokens), len(batch.microbatches)
        losses = self.pipeline.train(inputs, joined.all_labels, microbatches, totals)
        return torch.stack(losses) if losses else torch.zeros(microbatches, len(totals), device=self.mesh.device)

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Run one microbatch forward through all stages; returns zero on all but the last."""
        rest = {name: value for name, value in batch.inputs.items() if name != "tokens"}
        token_loss = self.loss.token_loss
        output = self.forward_only.run(batch.tokens, {**rest, "logits": token_loss.takes_logits})
        return torch.zeros((), device=self.mesh.device) if output is None else token_loss(output, batch.labels)

    def release(self) -> None:
        """Free the parameters that the forward passes gathered, and the activations that they sent."""
        self.forward_only.wait_for_sends()
        for part in self.model.parts:
            reshard(part)

    def set_loss_scale(self, scale: float) -> None:
        """Scale the training loss, and the auxiliary losses of routers."""
        self.loss.scale = scale
        _scale_router_losses(self.model.parts, scale)

    def set_microbatches(self, count: int) -> None:
        """Set the microbatches of a step in every router."""
        _set_router_microbatches(self.model.parts, count)


def _scale_router_losses(parts: Sequence[Decoder], scale: float) -> None:
    """Set the loss scale of every router: a tensor, as a compiled layer would be compiled again for another float.

    A kernel writes it: the host would wait for a copy.
    """
    for router, device in _routers(parts):
        router.loss_scale = torch.full((), scale, device=device)


def _set_router_microbatches(parts: Sequence[Decoder], count: int) -> None:
    """Set the microbatches of the global batch in every router, as a tensor for the same reason."""
    for router, device in _routers(parts):
        router.microbatches = torch.full((), float(count), device=device)


def _routers(parts: Sequence[Decoder]) -> Iterator[tuple[Router, torch.device]]:
    for part in parts:
        for layer in part.all_layers.values():
            if layer.moe_layer is not None:
                yield layer.moe_layer.router, part.device


def _dropout_seeds(model: Decoder, seed: int, samples: Sequence[int]) -> Tensor | None:
    """Return the dropout seeds of the samples, [B]; None for a model without dropout."""
    return sample_seeds(seed, samples, model.device) if model.config.needs_seeds else None
