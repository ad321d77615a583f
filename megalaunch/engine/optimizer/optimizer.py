"""The optimizer over named parameters, with its states under flat names for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalaunch.engine.model.model_parts import ModelParts
from megalaunch.engine.optimizer.muon import Muon
from megalaunch.engine.optimizer.update_rules import SGD, AdamW, Lion, ParameterState, Update, UpdateRule
from megalaunch.engine.precision.policy import compute_dtype, moment_dtype
from megalaunch.schema.optimizer import OptimizerSpec
from megalaunch.schema.precision import PrecisionSpec

_TABLES = ("embedding.weight", "head.weight")
"""The parameters of `optimizer.embedding_lr`, as of Megatron-LM's --decoupled-lr; not those of learned positions."""


@dataclass(frozen=True)
class _Group:
    """Parameters that are updated by one rule with one weight decay and one learning rate."""

    names: list[str]
    rule: UpdateRule
    weight_decay: float
    has_embedding_lr: bool


class Optimizer:
    """Update rules on this rank's shards.

    Weight decay applies to matrices, not to vectors (norms, biases) and the biases of experts.
    """

    def __init__(self, model: ModelParts, spec: OptimizerSpec, precision: PrecisionSpec) -> None:
        self._parameters = dict(model.named_parameters())
        self._states: dict[str, ParameterState] = {}
        self._state_dtype = moment_dtype(precision)
        self._groups = _groups(self._parameters, spec, precision)
        self._rules = {name: group.rule for group in self._groups for name in group.names}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the order of the model."""
        return list(self._parameters.values())

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: float = 1.0, embedding_lr: float | None = None) -> None:
        """Update the parameters with gradients / divisor, then drop the gradients.

        Args:
            learning_rate: Learning rate of this update.
            divisor: Gradients are divided by it inside fused updates, which saves a pass over them (clipping).
            embedding_lr: Learning rate of embedding and head; None: `learning_rate`.
        """
        for group in self._groups:
            trained = {name: self._parameters[name] for name in group.names if self._parameters[name].grad is not None}
            gradients = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
            states = [self._state(name) for name in trained]
            rate = embedding_lr if group.has_embedding_lr and embedding_lr is not None else learning_rate
            group.rule.apply(Update(list(trained.values()), gradients, states, rate, group.weight_decay, divisor))
        self.drop_grads()

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
            parameter = self._parameters[name]
            # the fused update requires the count on the parameter's device
            count = torch.zeros((), dtype=torch.float32, device=parameter.device)
            names = self._rules[name].state_names
            tensors = {
                state: torch.zeros_like(parameter, dtype=self._state_dtype, requires_grad=False) for state in names
            }
            self._states[name] = ParameterState(tensors, count)
        return self._states[name]


def _groups(parameters: dict[str, nn.Parameter], spec: OptimizerSpec, precision: PrecisionSpec) -> list[_Group]:
    """Return the groups of parameters by rule, weight decay and learning rate.

    Under muon the matrices of the blocks are groups of their own; embedding, head, routers and vectors have AdamW.
    """
    elementwise, muon = _elementwise_rule(spec), None
    if spec.name == "muon":
        muon = Muon(spec, torch.float32 if compute_dtype(precision) == torch.float32 else torch.bfloat16)
    groups: dict[tuple[UpdateRule, float, bool], list[str]] = {}
    for name, p in parameters.items():
        weight_decay = spec.weight_decay if p.ndim >= 2 and not name.endswith(".bias") else 0.0
        rule = muon if muon is not None and _is_hidden_matrix(name, p) else elementwise
        groups.setdefault((rule, weight_decay, name in _TABLES), []).append(name)
    return [_Group(names, *key) for key, names in groups.items()]


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
