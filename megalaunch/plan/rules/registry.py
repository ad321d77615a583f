"""The registry of rules. A rule is a function of a `RuleContext` that yields violations, registered by an id.

A rule may offer any fixes; the checker shows only those that it has verified. The docstring of the function is the
reason for the rule: the reference page of the rules prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from megalaunch.plan.findings import Severity
from megalaunch.plan.stage_validation import PipelineSplit, StageViolation, find_stage_violations
from megalaunch.plan.stages import virtual_stages
from megalaunch.plan.world import (
    data_parallel_size,
    expert_data_parallel_size,
    model_parallel_size,
    num_microbatches,
    world_size,
)
from megalaunch.platform.chip_facts import ChipFacts
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.detect import Machine
from megalaunch.schema import RunSpec

Purpose = Literal["validate", "train"]
Fix = Mapping[str, Any]
"""New values by key; applied together."""


@dataclass(frozen=True)
class RuleContext:
    """A resolved spec, and the purpose of the check: only validated ("validate") or about to run ("train").

    `machine` is the machine of the command, None if the run may start elsewhere.
    """

    spec: RunSpec
    purpose: Purpose = "validate"
    machine: Machine | None = None

    @property
    def local_machine(self) -> Machine | None:
        """The machine, if the run is for its chip."""
        made_for_it = self.machine is not None and self.machine.chip.name == self.spec.platform.chip
        return self.machine if made_for_it else None

    @cached_property
    def chip(self) -> ChipFacts | None:
        """The run's chip, with what this machine detected of it; None if it is unknown."""
        return self.local_machine.chip if self.local_machine else CHIPS.get(self.spec.platform.chip)

    @cached_property
    def world(self) -> int | None:
        """Number of devices; None while devices_per_node is open."""
        return world_size(self.spec.cluster)

    @cached_property
    def model_parallel_size(self) -> int:
        """Devices of one data-parallel rank: tp x pp x cp."""
        return model_parallel_size(self.spec.parallel)

    @cached_property
    def dp(self) -> int | None:
        """The data-parallel degree, if it is given and equals world / (tp x pp x cp); else None."""
        dp = self.spec.parallel.dp
        return dp if dp is not None and dp == data_parallel_size(self.world, self.spec.parallel) else None

    @cached_property
    def edp(self) -> int | None:
        """The data-parallel degree of routed experts; None if the expert grid does not divide the world."""
        return expert_data_parallel_size(self.world, self.spec.parallel)

    @cached_property
    def chunks(self) -> int:
        """Virtual stages of one pipeline rank (1: none), as given or by the pipeline layout."""
        return virtual_stages(self.spec)

    @cached_property
    def microbatches(self) -> int | None:
        """Microbatches per rank and step at the full batch; None if not an integer."""
        batch = self.spec.batch
        return num_microbatches(batch.global_batch_size, batch.micro_batch_size, self.dp)

    @cached_property
    def stage_violations(self) -> tuple[StageViolation, ...]:
        """The violations of the split of layers over stages; empty if it is valid."""
        return find_stage_violations(PipelineSplit.from_spec(self.spec))

    @cached_property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return self.spec.model.moe.num_experts is not None

    @cached_property
    def has_dense_layers(self) -> bool:
        """True when some layer has a dense feed-forward block."""
        moe = self.spec.model.moe
        return moe.num_experts is None or moe.first_k_dense_replace > 0 or moe.layer_freq > 1

    @property
    def pre_launch_severity(self) -> Severity:
        """Severity of a problem that may be solved before the launch: error only if the run is about to start."""
        return "error" if self.purpose == "train" else "warning"


@dataclass(frozen=True)
class Violation:
    """One violation of a rule; `fixes` are candidates, the best first."""

    path: str
    message: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    fixes: tuple[Fix, ...] = ()
    severity: Severity = "error"


Check = Callable[[RuleContext], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """A rule: its id, one sentence that must hold, and the function that checks it."""

    id: str
    sentence: str
    check: Check

    @property
    def domain(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    @property
    def why(self) -> str:
        """The reason for the rule: the function's docstring, on one line."""
        return " ".join((self.check.__doc__ or "").split())


RULES: dict[str, Rule] = {}


def rule(id: str, sentence: str) -> Callable[[Check], Check]:
    """Register a check under an id (`domain.what`)."""

    def register(check: Check) -> Check:
        if id in RULES:
            raise ValueError(f"two rules have the id {id}")
        RULES[id] = Rule(id, sentence, check)
        return check

    return register
