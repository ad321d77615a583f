"""One optimizer step, in the order that keeps every layout's numbers alike."""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass

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
    stop: signal.Signals | None


@dataclass(frozen=True)
class _Evidence:
    """What one rank knows about a step whose numbers are not finite."""

    rank: int
    finite_loss: bool
    samples: list[str]


class Step:
    """Count tokens, forward and backward, agree, clip, update."""

    def __init__(self, spec: RunSpec, mesh: Mesh, model: Decoder, optimizer: NamedAdamW, samples: Samples) -> None:
        self._spec, self._mesh, self._model, self._optimizer = spec, mesh, model, optimizer
        self._samples = samples

    def run(self, step: int, batch: StepBatch, received: signal.Signals | None) -> StepResult:
        """Step number `step`; raises Ending on every rank, before the update, when a batch or a number is bad."""
        tokens, unreadable = total_valid_tokens(batch.valid_tokens, batch.problem is not None, self._mesh.device)
        if unreadable:
            problems = [problem for problem in gather_objects(batch.problem) if problem]
            raise Ending(ExitCode.DATA, str(problems[0]), step - 1)
        loss = forward_backward(self._model, batch, tokens, self._spec)
        parameters = self._optimizer.parameters
        verdict = agree(loss, local_squared_norm(parameters), received)
        if not verdict.finite:
            self._refuse(step, batch, loss, verdict)
        clip(parameters, verdict.grad_norm, self._spec.optimizer.clip_grad)
        rate = learning_rate(self._spec.schedule, self._spec.optimizer.lr, step)
        self._optimizer.step(rate)
        return StepResult(verdict.loss, verdict.grad_norm, rate, tokens, verdict.stop)

    def _refuse(self, step: int, batch: StepBatch, loss: Tensor, verdict: Verdict) -> None:
        mine = _Evidence(
            self._mesh.rank,
            bool(torch.isfinite(loss)),
            [f"{index} ({self._samples.describe(index)})" for index in batch.indices],
        )
        everyone = [evidence for evidence in gather_objects(mine) if isinstance(evidence, _Evidence)]
        guilty = [evidence for evidence in everyone if not evidence.finite_loss]
        what, accused = ("loss", guilty) if guilty else ("gradient norm", everyone)
        ranks = ", ".join(f"{e.rank} ({self._mesh.topology.coordinates(e.rank)})" for e in accused)
        raise Ending(
            ExitCode.NON_FINITE,
            f"the {what} of step {step} is not finite (loss {verdict.loss}, gradient norm {verdict.grad_norm}) "
            f"on rank {ranks}; samples {'; '.join(accused[0].samples)}. The weights of step {step - 1} are unchanged: "
            "lower optimizer.lr, lengthen schedule.warmup_steps or look at these samples",
            step - 1,
            {"ranks": [asdict(evidence) for evidence in accused]},
        )


def forward_backward(model: Decoder, batch: StepBatch, total_tokens: int, spec: RunSpec) -> Tensor:
    """Accumulate the gradients of all microbatches; returns this rank's share of the mean token loss (fp32 scalar)."""
    share = torch.zeros((), dtype=torch.float32, device=batch.microbatches[0].tokens.device)
    for number, microbatch in enumerate(batch.microbatches, start=1):
        announce_microbatch(model, spec.parallel.data_sharding, last=number == len(batch.microbatches))
        loss = summed_token_loss(model(microbatch.tokens), microbatch.labels) / max(total_tokens, 1)
        torch.autograd.backward(loss)
        share += loss.detach()
    return share
