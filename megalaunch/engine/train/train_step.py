"""One optimizer step, in an order that gives the same numbers under every parallel layout.

Count valid tokens (all-reduce), forward and backward with gradient accumulation, sum partial gradients, reduce loss and
squared gradient norm (one all-reduce), check that both are finite, update.

In fp16 gradients that are not finite skip the update, and so does a norm above `optimizer.skip_step_grad_norm`: on all
ranks alike, as the norm is that of all ranks. As in Megatron-LM a skipped step advances data, tokens and steps, and the
routers' loads and biases, which depend on the forward pass alone; it does not advance the learning rate schedule and
the optimizer's number of updates, and enters no amax history. A bad step (`bad_steps.py`) ends before its update.

With `parallel.outer_steps` the R replicas share no gradients, but agree on everything else. Each divides its losses by
1 / R of the global number of tokens, so that the mean of their gradients is the gradient of the mean token loss. Loss
and gradient norm of a step, the largest of the replicas', judge it for all of them; each clips its own gradients.
"""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from megalaunch.data.samples.sample import Dataset
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.model.moe.load import ExpertStats, expert_counts
from megalaunch.engine.optimizer.learning_rate import embedding_learning_rate, learning_rate
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.optimizer.weight_decay import weight_decay
from megalaunch.engine.parallel.float8 import begin_float8_step, end_float8_step, update_float8_scales
from megalaunch.engine.parallel.step_observer import NO_OBSERVER, StepObserver
from megalaunch.engine.platform.registry import platform_of
from megalaunch.engine.precision.loss_scale import UpdateState
from megalaunch.engine.run_end import RankError, RunEnd
from megalaunch.engine.train.bad_steps import BadStep, LossHistory
from megalaunch.engine.train.dataloader import StepBatch
from megalaunch.engine.train.expert_load import first_non_finite_router, take_expert_sums, update_routers
from megalaunch.engine.train.forward_backward import ForwardBackward
from megalaunch.engine.train.grads import clip_divisor, finalize_grads, local_grad_norm_sq
from megalaunch.engine.train.rank_sync import StepReduction, all_gather_objects, reduce_step_stats, total_valid_tokens
from megalaunch.plan.batch import samples_of_step, schedule_position
from megalaunch.rundir.outcome import ExitCode
from megalaunch.schema import RunSpec

_SAMPLES_SHOWN = 4  # in the reason; outcome.json holds all


@dataclass(frozen=True)
class StepResult:
    """Result of one step, the same on every rank; `tokens` counts labels with a loss, `stop` is a received signal.

    `loss` is the decoder's, `mtp_losses` are those of MTP depths. `experts` summarizes the load of the experts, and
    `expert_counts` are the tokens sent to each of them [layers, experts], on the CPU; None without.
    `loss_scale` is that of this step in fp16, `skipped` says whether it was skipped, `updates` is for the next step.
    `weight_decay` is that of a schedule; None: it is constant.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    stop: signal.Signals | None = None
    experts: ExpertStats | None = None
    mtp_losses: tuple[float, ...] = ()
    expert_counts: Tensor | None = None
    loss_scale: float | None = None
    skipped: bool = False
    updates: UpdateState = field(default_factory=UpdateState)
    weight_decay: float | None = None


@dataclass(frozen=True)
class _Rates:
    """What the schedules give one update; `embedding` is the learning rate of embedding and head, None: `learning`."""

    learning: float
    embedding: float | None
    weight_decay: float


@dataclass(frozen=True)
class _NonFiniteRank:
    """A rank, and descriptions of the samples in its microbatches whose loss is not finite.

    `router_layer` is its first layer whose router had logits that are not finite; None without one.
    """

    rank: int
    samples: list[str]
    router_layer: int | None


class TrainStep:
    """The training step: valid token count, forward and backward, gradient reduction, clipping and update.

    `samples` describes the samples of a loss that is not finite; None: they are named by their index.
    `observer` gets the forward and backward passes as the phase "forward", of which backward passes report themselves,
    and what follows up to the update as "optimizer".
    `updates` is the state that a resumed run continues with, `history` has its last losses.
    """

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        model: ModelParts,
        forward_backward: ForwardBackward,
        optimizer: Optimizer,
        samples: Dataset | None = None,
        observer: StepObserver = NO_OBSERVER,
        updates: UpdateState | None = None,
        history: LossHistory | None = None,
    ) -> None:
        self._spec, self._mesh, self._model, self._optimizer = spec, mesh, model, optimizer
        self._forward_backward, self._samples, self._observer = forward_backward, samples, observer
        self._history = history or LossHistory(spec.train)
        self._outer = optimizer.outer
        if spec.parallel.outer_steps and self._outer is None:
            raise ValueError(
                f"parallel.outer_steps={spec.parallel.outer_steps}, but the optimizer makes no outer steps: build it "
                "with megalaunch.engine.optimizer.build.build_optimizer(spec, mesh, model)"
            )
        self._replicas = 1 if self._outer is None else self._outer.replicas  # those that share no gradients
        self.set_updates(updates or UpdateState())

    def set_updates(self, updates: UpdateState) -> None:
        """Continue with the state of the updates at another step."""
        self._updates = updates.with_scale(self._spec.precision)

    def leave_out(self, step: int) -> UpdateState:
        """Count a step whose batch is left out; return the state for the next step. Collective: it may end a round."""
        self._updates = replace(self._updates, skipped_steps=self._updates.skipped_steps + 1)
        if self._outer is not None:
            self._outer.begin_round()
            self._outer.step_if_due(step)
        return self._updates

    def run(
        self,
        step: int,
        batch: StepBatch,
        stop_request: Callable[[], signal.Signals | None] = lambda: None,
        problem: RankError | None = None,
    ) -> StepResult:
        """Run one step. Collective.

        Args:
            step: Number of the step, from 1.
            batch: This rank's microbatches, or the reason why they could not be read.
            stop_request: Returns the signal by which this rank is to stop; called and reduced with the loss.
            problem: Error of this rank; ends the run on every rank.

        Raises:
            RunEnd: On every rank, before the update, if any rank has a problem or a loss or the norm is not finite;
                in fp16 the norm may be, until the loss scale is at its minimum.
            BadStep: In place of it, with another `train.bad_step_action` than "stop".
        """
        total, *mtp_totals = self._count_tokens(step, batch, problem or batch.problem)
        counts = total / self._replicas, [each / self._replicas for each in mtp_totals]
        self._set_up_model(step)
        with self._observer.phase_scope("forward"):
            losses = self._forward_backward.train(batch, *counts)
        with self._observer.phase_scope("optimizer"):
            result = self._reduce_and_update(step, batch, total, counts, losses, stop_request)
        return result

    def _reduce_and_update(
        self,
        step: int,
        batch: StepBatch,
        total: int,
        counts: tuple[float, list[float]],
        losses: Tensor,
        stop_request: Callable[[], signal.Signals | None],
    ) -> StepResult:
        """Reduce gradients and losses over all ranks, and update the parameters if the step is good."""
        updates, limits = self._updates, self._spec.precision.loss_scale
        # All tp ranks and pipeline stages read the same samples: one of them contributes losses to the sum.
        share = self._mesh.is_loss_rank / self._replicas
        # Before the norm, which must be that of the full gradients.
        finalize_grads(self._model, self._mesh, bool(self._spec.parallel.sequence_parallel))
        squared_norms = self._in_own_place(local_grad_norm_sq(self._optimizer.parameters))
        sums = take_expert_sums(self._model, self._mesh.device)
        stats = reduce_step_stats(losses.sum(0) * share, squared_norms, stop_request(), sums)
        stats = replace(stats, grad_norm=stats.grad_norm / updates.factor)
        overflowed = stats.finite_losses and not math.isfinite(stats.grad_norm) and updates.may_skip(limits)
        self._require_good(step, batch, counts, losses, stats, overflowed)
        skipped = overflowed or stats.grad_norm > (self._spec.optimizer.skip_step_grad_norm or math.inf)
        rates = self._rates(step - updates.skipped_steps)
        self._update(step, rates, stats, skipped=skipped)
        self._updates = updates.after(limits, skipped=skipped, overflowed=overflowed)
        experts = loads = None
        if stats.expert_sums is not None and stats.expert_sums_on_host is not None:
            moe = self._spec.model.moe
            update_routers(self._model, stats.expert_sums, moe)
            experts = ExpertStats.from_sums(stats.expert_sums_on_host, moe.top_k)
            loads = expert_counts(stats.expert_sums_on_host)
        return StepResult(
            stats.loss,
            stats.grad_norm,
            rates.learning,
            total,
            stats.stop,
            experts,
            stats.mtp_losses,
            loads,
            None if updates.loss_scale is None else updates.factor,
            skipped,
            self._updates,
            rates.weight_decay if self._spec.schedule.weight_decay_grows else None,
        )

    @property
    def _replica(self) -> int:
        """Index of this rank's replica among those that share no gradients."""
        return 0 if self._outer is None else self._outer.replica

    def _in_own_place(self, value: Tensor) -> Tensor:
        """Return a scalar of this rank at the index of its replica, zeros elsewhere: [replicas]."""
        return torch.cat(
            [value.view(1) if index == self._replica else value.new_zeros(1) for index in range(self._replicas)]
        )

    def _set_up_model(self, step: int) -> None:
        """Set what the modules of the model read or draw from in this step."""
        self._set_loss_factors(step)
        self._seed_generators(step)
        begin_float8_step(self._model)
        if self._outer is not None:
            self._outer.begin_round()

    def _seed_generators(self, step: int) -> None:
        """Seed torch's generators for modules of a library user, so that a step draws the same after a restart.

        Tensor-parallel ranks draw alike: outside of tensor-parallel regions they hold the same activations. The
        standard modules compute their random numbers from the seed and the place of each value.
        """
        if not self._model.has_standard_modules:
            mesh = self._mesh
            sequence = np.random.SeedSequence([self._spec.train.seed, step, mesh.dp_rank, mesh.cp.rank, mesh.pp.rank])
            platform_of(mesh.device).manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))

    def _set_loss_factors(self, step: int) -> None:
        """Set what multiplies the losses of this step: the scale of fp16, and the share of a rampup's microbatches."""
        if self._updates.loss_scale is not None:
            self._forward_backward.set_loss_scale(self._updates.factor)
        batch = self._spec.batch
        if batch.rampup_batch_size is not None:
            samples = len(samples_of_step(self._spec, step))
            self._forward_backward.set_microbatches(samples // (batch.micro_batch_size or 1))

    def _update(self, step: int, rates: _Rates, stats: StepReduction, *, skipped: bool) -> None:
        """Update the parameters with clipped, unscaled gradients; a skipped step drops them. Then end a round."""
        if skipped:
            self._optimizer.drop_grads()
        else:
            norm = stats.replica_norms[self._replica] / self._updates.factor
            divisor = clip_divisor(norm, self._spec.optimizer.clip_grad) * self._updates.factor
            end_float8_step(self._model, self._mesh)
            self._optimizer.step(rates.learning, divisor, rates.embedding, rates.weight_decay)
            update_float8_scales(self._model)
        if self._outer is not None:
            self._outer.step_if_due(step)

    def _count_tokens(self, step: int, batch: StepBatch, problem: RankError | None) -> tuple[int, ...]:
        """Return the labels with a loss, and those of each MTP depth; raises RunEnd if any rank has a problem."""
        mine = [0] * (1 + self._spec.model.mtp.num_layers)
        if self._mesh.is_loss_rank and problem is None:
            mine = [batch.valid_tokens, *batch.mtp_valid_tokens]
        return total_valid_tokens(mine, problem, step - 1, self._mesh.device)

    def _rates(self, update: int) -> _Rates:
        """Return the learning rates and the weight decay of an update."""
        schedule, optimizer = self._spec.schedule, self._spec.optimizer
        position = schedule_position(self._spec, update)
        return _Rates(
            learning_rate(schedule, optimizer.lr, position),
            embedding_learning_rate(schedule, optimizer.embedding_lr, position),
            weight_decay(schedule, optimizer.weight_decay, position),
        )

    def _require_good(
        self,
        step: int,
        batch: StepBatch,
        counts: tuple[float, list[float]],
        losses: Tensor,
        stats: StepReduction,
        overflowed: bool,
    ) -> None:
        """Raise RunEnd or BadStep if the step is bad, on every rank; else add its loss to the history. Collective."""
        spike = self._history.describe_spike(stats.loss) if stats.finite else None
        if not stats.finite and not overflowed:
            ending = self._non_finite_end(step, batch, losses, stats)
        elif spike is not None:
            reason = f"the loss {stats.loss:.4g} of step {step} {spike}; the update was not made"
            ending = RunEnd(ExitCode.NON_FINITE, reason, step - 1, {"spike": stats.loss})
        else:
            self._history.append(stats.loss)
            return
        if self._spec.train.rerun_mode == "validate_results":
            again = self._rerun(batch, counts, losses)
            ending = RunEnd(ending.exit_code, f"{ending.reason}; {again}", ending.step, ending.details)
        self._refuse(ending, stats.stop)

    def _rerun(self, batch: StepBatch, counts: tuple[float, list[float]], losses: Tensor) -> str:
        """Compute the losses of a bad step again; return which ranks got others. Collective.

        Differences of kernels that are not deterministic are far below the tolerance.
        """
        self._optimizer.drop_grads()
        again = self._forward_backward.train(batch, *counts)
        take_expert_sums(self._model, self._mesh.device)
        same = torch.allclose(again, losses, rtol=1e-3, atol=0, equal_nan=True)
        rank = self._mesh.rank
        mine = None if same else f"rank {rank} ({self._mesh.topology.coordinates(rank)}) on {socket.gethostname()}"
        ranks = [name for name in all_gather_objects(mine) if name]
        if not ranks:
            return "computed again, all losses are the same"
        return f"computed again, the losses of {', '.join(map(str, ranks))} are others: suspect these devices"

    def _refuse(self, ending: RunEnd, stop: signal.Signals | None) -> NoReturn:
        """End a bad step before its update: raise `ending`, or a BadStep if the run continues without the batch."""
        if self._spec.train.bad_step_action == "stop":
            raise ending
        self._optimizer.drop_grads()
        raise BadStep(ending, stop)

    def _non_finite_end(self, step: int, batch: StepBatch, losses: Tensor, stats: StepReduction) -> RunEnd:
        """Return the end that names the samples in microbatches whose loss is not finite. Collective."""
        finite = torch.isfinite(losses).all(dim=1).tolist()
        bad = [index for indices, good in zip(batch.indices, finite, strict=True) if not good for index in indices]
        bad = bad if self._mesh.is_loss_rank else []
        mine = _NonFiniteRank(
            self._mesh.rank, [self._describe(index) for index in bad], first_non_finite_router(self._model)
        )
        ranks = [found for found in all_gather_objects(mine) if isinstance(found, _NonFiniteRank)]
        message = self._non_finite_message(step, [found for found in ranks if found.samples], stats)
        return RunEnd(
            ExitCode.NON_FINITE,
            f"{message}{self._router_message(ranks)}; the update was not made",
            step - 1,
            {"ranks": [asdict(found) for found in ranks if found.samples or found.router_layer is not None]},
        )

    def _describe(self, index: int) -> str:
        return f"sample {index}" if self._samples is None else self._samples.describe(index)

    def _router_message(self, ranks: list[_NonFiniteRank]) -> str:
        """Name the first layer whose router was not finite: layers before it were."""
        bad = [(found.router_layer, found.rank) for found in ranks if found.router_layer is not None]
        if not bad:
            return ""
        layer, rank = min(bad)
        place = f"rank {rank} ({self._mesh.topology.coordinates(rank)})"
        return f"; the first router whose logits are not finite is that of layer {layer}, on {place}"

    def _non_finite_message(self, step: int, bad_ranks: list[_NonFiniteRank], stats: StepReduction) -> str:
        if bad_ranks:
            ranks = ", ".join(f"{e.rank} ({self._mesh.topology.coordinates(e.rank)})" for e in bad_ranks)
            samples = [sample for evidence in bad_ranks for sample in evidence.samples]
            more = f"; and {len(samples) - _SAMPLES_SHOWN} more" if len(samples) > _SAMPLES_SHOWN else ""
            shown = "; ".join(samples[:_SAMPLES_SHOWN])
            return f"the loss of step {step} is not finite on rank {ranks}, in the microbatch of: {shown}{more}"
        # Gradients were summed over ranks before this check, so the rank of origin is lost.
        read, scale = samples_of_step(self._spec, step), self._updates.loss_scale
        scaled = "" if scale is None else f", with the loss scale at its minimum of {scale.scale:g}"
        return (
            f"the gradient norm of step {step} is {stats.grad_norm} though its loss is {stats.loss:.4g}, "
            f"in samples {read.start} to {read.stop - 1}{scaled}"
        )
