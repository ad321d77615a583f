"""One optimizer step, in the order that keeps every layout's numbers alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalaunch.config.schema import RunSpec
from megalaunch.engine.ending import Ending
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.parallel.data import announce_microbatch
from megalaunch.engine.train.agreement import Verdict, agree, gather_objects, total_valid_tokens
from megalaunch.engine.train.batches import Samples, StepBatch
from megalaunch.engine.train.clip import clip, local_squared_norm
from megalaunch.engine.train.loss import summed_token_loss
from megalaunch.engine.train.optimizer import NamedAdamW
from megalaunch.engine.train.schedule import learning_rate
from megalaunch.rundir.outcome import ExitCode


@dataclass(frozen=True)
class StepResult:
    """What one step did; `tokens` counts the labels that had a loss."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    stop: bool


class Step:
    """Count tokens, forward and backward, agree, clip, update."""

    def __init__(self, spec: RunSpec, mesh: Mesh, model: Decoder, optimizer: NamedAdamW, samples: Samples) -> None:
        self._spec, self._mesh, self._model, self._optimizer = spec, mesh, model, optimizer
        self._samples = samples

    def run(self, step: int, batch: StepBatch, wants_stop: bool) -> StepResult:
        """Step number `step`; raises Ending on every rank, before the update, when a batch or a number is bad."""
        tokens, unreadable = total_valid_tokens(batch.valid_tokens, batch.problem is not None, self._mesh.device)
        if unreadable:
            problems = [problem for problem in gather_objects(batch.problem) if problem]
            raise Ending(ExitCode.DATA, str(problems[0]), step - 1)
        loss = forward_backward(self._model, batch, tokens, self._spec)
        parameters = self._optimizer.parameters
        verdict = agree(loss, local_squared_norm(parameters), wants_stop)
        if not verdict.finite:
            self._refuse(step, batch, loss, verdict)
        clip(parameters, verdict.grad_norm, self._spec.optimizer.clip_grad)
        rate = learning_rate(self._spec.schedule, self._spec.optimizer.lr, step)
        self._optimizer.step(rate)
        return StepResult(verdict.loss, verdict.grad_norm, rate, tokens, verdict.stop_votes > 0)

    def _refuse(self, step: int, batch: StepBatch, loss: Tensor, verdict: Verdict) -> None:
        finite = bool(torch.isfinite(loss))
        samples = [f"{index} ({self._samples.describe(index)})" for index in batch.indices]
        everyone = gather_objects((self._mesh.rank, finite, samples))
        guilty = [entry for entry in everyone if isinstance(entry, tuple) and not entry[1]]
        what = "loss" if guilty else "gradient norm"
        ranks = [{"rank": rank, "samples": names} for rank, _, names in guilty or everyone]  # type: ignore[misc]
        names = ", ".join(f"{r['rank']} ({self._mesh.topology.coordinates(r['rank'])})" for r in ranks)
        raise Ending(
            ExitCode.NON_FINITE,
            f"the {what} of step {step} is not finite (loss {verdict.loss}, gradient norm {verdict.grad_norm}) "
            f"on rank {names}; samples {'; '.join(ranks[0]['samples'])}. The weights of step {step - 1} are unchanged: "
            "lower optimizer.lr, lengthen schedule.warmup_steps or look at these samples",
            step - 1,
            {"ranks": ranks},
        )


def forward_backward(model: Decoder, batch: StepBatch, total_tokens: int, spec: RunSpec) -> Tensor:
    """Accumulate the gradients of all microbatches; returns this rank's share of the mean token loss (fp32 scalar)."""
    share = torch.zeros((), dtype=torch.float32, device=batch.microbatches[0].tokens.device)
    for number, microbatch in enumerate(batch.microbatches, start=1):
        announce_microbatch(model, spec.parallel.data_sharding, last=number == len(batch.microbatches))
        loss = summed_token_loss(model(microbatch.tokens), microbatch.labels) / max(total_tokens, 1)
        loss.backward()
        share += loss.detach()
    return share
