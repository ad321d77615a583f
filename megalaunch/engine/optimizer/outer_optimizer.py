"""Outer steps (`parallel.outer_steps`): replicas train apart for H steps, then average what they learned.

DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1). A round begins with the outer weights W on all R
replicas. Each replica r makes H updates with its own gradients and its own optimizer states, and then has weights w_r:

    G = mean_r (W - w_r)        pseudo-gradient, one all-reduce over the replicas
    M = mu M + G                momentum
    W = W - lr (G + mu M)       Nesterov, as torch.optim.SGD
    w_r = W

With lr = 1 and mu = 0 the new weights are the mean of the replicas': local SGD, or federated averaging. Optimizer
states of the inner updates stay with their replica. W and M are in fp32 and sharded like the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.mesh import Mesh
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.plan.memory.model_states import OUTER_BUCKET
from megalaunch.schema import RunSpec

_REPLICA, _MOMENTUM = "replica", "outer.momentum."


class OuterOptimizer:
    """The outer weights and momentum of this rank's shards.

    Attributes:
        in_round: The replicas have trained apart since the last outer step: their weights are not the outer ones.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, model: ModelParts) -> None:
        self._model, self._axis, self._group = model, mesh.replicas, mesh.world_mesh.get_group("dp_replicate")
        self._interval, self._last_step = spec.parallel.outer_steps, spec.train.steps
        self._learning_rate, self._beta = spec.parallel.outer_lr, spec.parallel.outer_momentum
        self._parameters = dict(model.named_parameters())
        self._weights: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        self.in_round = False

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self._axis.size

    @property
    def replica(self) -> int:
        """Index of this rank's replica."""
        return self._axis.rank

    def states(self) -> dict[str, Tensor]:
        """Return outer weights and momentum, which every replica holds; allocated when first asked for."""
        if not self._weights:
            self._weights = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
            if self._beta:
                self._momentum = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
        momentum = {_MOMENTUM + name: tensor for name, tensor in self._momentum.items()}
        return {**momentum, **{f"outer.{name}": tensor for name, tensor in self._weights.items()}}

    @torch.no_grad()
    def begin_round(self) -> None:
        """Before a step: the first one of a round begins with the outer weights, which are kept."""
        if not self.in_round:
            self.states()
            for name, parameter in self._parameters.items():
                to_local_no_grad(self._weights[name]).copy_(to_local_no_grad(parameter))
            self.in_round = True

    @torch.no_grad()
    def step_if_due(self, step: int) -> None:
        """After step number `step`: make an outer step if it ends a round, as the last step of the run does too.

        Collective over replicas and pipeline stages.
        """
        if step % self._interval and step != self._last_step:
            return
        for bucket in self._buckets():
            self._update(bucket)
        self._model.copy_embedding()
        self.in_round = False

    def _buckets(self) -> Iterator[list[str]]:
        """Yield the parameters in buckets of one all-reduce each: a link between sites has a long latency."""
        bucket, size = [], 0
        for name, parameter in self._parameters.items():
            bucket.append(name)
            size += to_local_no_grad(parameter).numel()
            if size >= OUTER_BUCKET:
                yield bucket
                bucket, size = [], 0
        if size:
            yield bucket

    def _update(self, names: list[str]) -> None:
        weights = [to_local_no_grad(self._weights[name]) for name in names]
        trained = [to_local_no_grad(self._parameters[name]) for name in names]
        sizes = [weight.numel() for weight in weights]
        flat = weights[0].new_empty(sum(sizes))
        gradients = [part.view_as(like) for part, like in zip(torch.split(flat, sizes), weights, strict=True)]
        for gradient, weight, local in zip(gradients, weights, trained, strict=True):
            torch.sub(weight, local, out=gradient)
        dist.all_reduce(flat, group=self._group)
        flat /= self.replicas
        for name, gradient, weight, local in zip(names, gradients, weights, trained, strict=True):
            if self._beta:
                momentum = to_local_no_grad(self._momentum[name])
                momentum.mul_(self._beta).add_(gradient)
                gradient.add_(momentum, alpha=self._beta)
            weight.sub_(gradient, alpha=self._learning_rate)
            local.copy_(weight)

    def saved_tensors(
        self, prefix: str, weights: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint from those of a replica.

        Each replica saves its optimizer states under names of its own, and within a round its weights too: the outer
        weights then have the usual names.

        Args:
            prefix: That of the names of weights.
            weights: Parameters and buffers of this replica, by name with prefix.
            states: Its optimizer states.
        """
        self.states()
        shared, own = dict(weights), dict(states)
        if self.in_round:
            for name, outer in self._weights.items():
                own[prefix + name], shared[prefix + name] = shared[prefix + name], outer
        shared |= {_MOMENTUM + name: tensor for name, tensor in self._momentum.items()}
        return {**shared, **{f"{_REPLICA}{self.replica}.{name}": tensor for name, tensor in own.items()}}


def is_of_one_replica(name: str) -> bool:
    """Return whether a saved tensor belongs to one replica alone."""
    return name.startswith(_REPLICA)


def saved_replicas(names: Mapping[str, object], prefix: str) -> tuple[int, bool]:
    """Return how many replicas have states in a checkpoint, and whether it was saved within a round.

    Args:
        names: The names of its tensors.
        prefix: That of the names of weights.
    """
    own = [name.partition(".") for name in names if is_of_one_replica(name)]
    return len({replica for replica, _, _ in own}), any(name.startswith(prefix) for _, _, name in own)
