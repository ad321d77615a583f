"""The optimizer over named parameters, with its states under flat names for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalaunch.engine.dtensor import to_local_no_grad
from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.host_memory import HostCopies, PinnedHostCopies, choose_offloaded
from megalaunch.engine.optimizer.muon import Muon
from megalaunch.engine.optimizer.outer_optimizer import OuterOptimizer
from megalaunch.engine.optimizer.update_rules import SGD, AdamW, Lion, ParameterState, Update, UpdateRule
from megalaunch.engine.precision.policy import compute_dtype, moment_dtype
from megalaunch.kernels.overridable import build_for
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.precision import PrecisionSpec

_TABLES = ("embedding.weight", "head.weight")
"""The parameters of `optimizer.embedding_lr`, as of Megatron-LM's --decoupled-lr; not those of learned positions."""


@dataclass(frozen=True)
class _Group:
    """Parameters that are updated by one rule, with one learning rate, and with weight decay or without."""

    names: list[str]
    rule: UpdateRule
    has_weight_decay: bool
    has_embedding_lr: bool


class Optimizer:
    """Update rules on this rank's shards.

    Weight decay applies to matrices and, with `apply_wd_to_qk_layernorm`, to QK norms; not to other vectors (norms,
    biases) and the biases of experts. The states of a fraction of the parameters may be in host memory
    (`optimizer_offload_fraction`), copied by `host` (None: as the device does). `outer` makes the outer steps of
    `parallel.outer_steps`; `build_optimizer` gives it.
    """

    def __init__(
        self,
        model: ModelParts,
        spec: OptimizerSpec,
        precision: PrecisionSpec,
        host: HostCopies | None = None,
        outer: OuterOptimizer | None = None,
    ) -> None:
        self.outer = outer
        self._model, self._parameters = model, dict(model.named_parameters())
        self._states: dict[str, ParameterState] = {}
        self._state_dtype, self._weight_decay = moment_dtype(precision), spec.weight_decay
        # A pipeline stage may have no parameters, and then builds nothing.
        with build_for(next((param.device for param in self.parameters), torch.device("cpu"))):
            self._groups = _groups(self._parameters, spec, precision)
        self._rules = {name: group.rule for group in self._groups for name in group.names}
        self._offloaded = choose_offloaded(self._parameters, spec.optimizer_offload_fraction)
        if host is None and self._offloaded:
            host = PinnedHostCopies(to_local_no_grad(self.parameters[0]).device)
        self._host = host

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of the model."""
        return list(self._parameters.values())

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        divisor: float = 1.0,
        embedding_lr: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """Update the parameters with gradients / divisor, and drop the gradients. Collective over pipeline stages.

        Args:
            learning_rate: Learning rate of this update.
            divisor: Gradients are divided by it inside fused updates, which saves a pass over them (clipping).
            embedding_lr: Learning rate of embedding and head; None: `learning_rate`.
            weight_decay: Weight decay of this update; None: `optimizer.weight_decay`.
        """
        decay = self._weight_decay if weight_decay is None else weight_decay
        rates = [embedding_lr if group.has_embedding_lr else None for group in self._groups]
        updates = [
            partial(
                Update,
                learning_rate=learning_rate if rate is None else rate,
                weight_decay=decay if group.has_weight_decay else 0.0,
                divisor=divisor,
            )
            for group, rate in zip(self._groups, rates, strict=True)
        ]
        on_host = [self._trained(group, offloaded=True) for group in self._groups]
        for trained in on_host:
            self._send_to_host(trained)
        for group, make_update in zip(self._groups, updates, strict=True):
            trained = self._trained(group, offloaded=False)
            states = [self._state(name) for name in trained]
            group.rule.apply(make_update(list(trained.values()), _gradients(trained), states))
        for group, make_update, trained in zip(self._groups, updates, on_host, strict=True):
            self._update_on_host(group.rule, make_update, trained)
        if self._host is not None:
            self._host.finish()
        self._model.copy_embedding()
        self.drop_grads()

    def _trained(self, group: _Group, *, offloaded: bool) -> dict[str, nn.Parameter]:
        """Return the parameters of a group that have gradients, and whose states are on the host or on the device."""
        names = [name for name in group.names if (name in self._offloaded) == offloaded]
        return {name: self._parameters[name] for name in names if self._parameters[name].grad is not None}

    def _send_to_host(self, trained: dict[str, nn.Parameter]) -> None:
        """Start the copies of weights and gradients to the host."""
        for (name, parameter), gradient in zip(trained.items(), _gradients(trained), strict=True):
            assert self._host is not None, "offloaded parameters have a host"
            self._host.send(name, to_local_no_grad(parameter), to_local_no_grad(gradient))

    def _update_on_host(
        self, rule: UpdateRule, make_update: Callable[..., Update], trained: dict[str, nn.Parameter]
    ) -> None:
        """Update weights and states on the host, one parameter after the other, and start the copies back."""
        for name, parameter in trained.items():
            assert self._host is not None, "offloaded parameters have a host"
            weight, gradient = self._host.receive(name)
            rule.apply(make_update([weight], [gradient], [self._state(name)]))
            self._host.send_back(name, to_local_no_grad(parameter))

    def drop_grads(self) -> None:
        """Free the gradients: after an update, or in its place if the step is skipped."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def states(self) -> dict[str, Tensor]:
        """Return the states by flat name (`optimizer.exp_avg.<parameter>`); zeros before the first step."""
        return {
            f"optimizer.{state}.{name}": tensor
            for name in self._parameters
            for state, tensor in self._state(name).tensors.items()
        }

    def set_step(self, count: int) -> None:
        """Set the number of updates so far, on which AdamW's bias correction depends."""
        for name in self._parameters:
            self._state(name).updates.fill_(count)

    def _state(self, name: str) -> ParameterState:
        """Return the state of a parameter; made when first asked for, as its memory is not needed before."""
        if name not in self._states:
            parameter, dtype = self._parameters[name], self._state_dtype
            names = self._rules[name].state_names
            # the fused update requires the count on the device of the states
            if name in self._offloaded:
                assert self._host is not None, "offloaded parameters have a host"
                count = torch.zeros((), dtype=torch.float32, device="cpu")
                tensors = {state: self._host.zeros_like(parameter, dtype) for state in names}
            else:
                count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                tensors = {state: torch.zeros_like(parameter, dtype=dtype, requires_grad=False) for state in names}
            self._states[name] = ParameterState(tensors, count)
        return self._states[name]


def _gradients(parameters: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """Return the gradients of parameters that all have one."""
    return [parameter.grad for parameter in parameters.values() if parameter.grad is not None]


def _groups(parameters: dict[str, nn.Parameter], spec: OptimizerSpec, precision: PrecisionSpec) -> list[_Group]:
    """Return the groups of parameters by rule, whether they decay, and learning rate.

    Under muon the matrices of the blocks are groups of their own; embedding, head, routers and vectors have AdamW.
    """
    elementwise, muon = _elementwise_rule(spec), None
    if spec.name == "muon":
        muon = Muon(spec, torch.float32 if compute_dtype(precision) == torch.float32 else torch.bfloat16)
    groups: dict[tuple[UpdateRule, bool, bool], list[str]] = {}
    for name, p in parameters.items():
        is_matrix = p.ndim >= 2 and not name.endswith(".bias")
        decays = is_matrix or (spec.apply_wd_to_qk_layernorm and _is_qk_norm(name))
        rule = muon if muon is not None and _is_hidden_matrix(name, p) else elementwise
        groups.setdefault((rule, decays, name in _TABLES), []).append(name)
    return [_Group(names, *key) for key, names in groups.items()]


def _is_qk_norm(name: str) -> bool:
    """Return whether a parameter is a weight or bias of the norm of queries or keys; those of latents are not."""
    return not {"q_norm", "k_norm"}.isdisjoint(name.split("."))


def _elementwise_rule(spec: OptimizerSpec) -> UpdateRule:
    """Return the rule of the parameters that are updated elementwise: all but those of Muon itself."""
    if spec.name == "sgd":
        return SGD(spec)
    return Lion(spec) if spec.name == "lion" else AdamW(spec)


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter maps hidden states: not embedding, positions, head, router or gate of shared experts.

    Routed experts have a matrix each.
    """
    if parameter.ndim < 2 or name.endswith(".bias") or name.startswith(("embedding.", "head.")):
        return False
    return not {"router", "shared_expert_gate"} & set(name.split("."))
