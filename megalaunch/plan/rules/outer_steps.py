"""Rules of outer steps: replicas that train apart, and what is not done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megalaunch.plan.findings import as_override
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.suggestions import multiples
from megalaunch.plan.world import replicas_and_shards
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import value_at

_OFF = {"parallel.outer_steps": 0}


@dataclass(frozen=True)
class _Refused:
    """A setting that outer steps do not have: where `holds`, `instead` is a value of the key that they have."""

    key: str
    holds: Callable[[RunSpec], bool]
    instead: Any


_REFUSED = (
    _Refused("model.moe.num_experts", lambda spec: spec.model.moe.num_experts is not None, None),
    _Refused("model.mtp.num_layers", lambda spec: spec.model.mtp.num_layers > 0, 0),
    _Refused("precision.compute_dtype", lambda spec: spec.precision.compute_dtype in ("fp16", "fp8"), "bf16"),
    _Refused("precision.main_params_dtype", lambda spec: spec.precision.main_params_dtype != "fp32", "fp32"),
    _Refused("optimizer.optimizer_offload_fraction", lambda spec: spec.optimizer.optimizer_offload_fraction > 0, 0.0),
)


@rule("parallel.outer_steps_need_replicas", "outer_steps is set only with several replicas.")
def outer_steps_need_replicas(at: RuleContext) -> Iterator[Violation]:
    """Replicas train apart: those of hsdp<N>, or without sharding every data-parallel rank."""
    p = at.spec.parallel
    if not p.outer_steps or at.dp is None or replicas_and_shards(at.dp, p)[0] > 1:
        return
    yield Violation(
        "parallel.outer_steps",
        f"outer_steps {p.outer_steps} has no replicas to average: dp is {at.dp}, dp_replicate {p.dp_replicate}",
        {"outer_steps": p.outer_steps, "dp": at.dp, "dp_replicate": p.dp_replicate},
        ({"parallel.dp_replicate": 2}, {"parallel.data_sharding": "no_shard"}, _OFF),
    )


@rule("parallel.outer_steps_with", "outer_steps is used with dense models in fp32 or bf16, updated on their devices.")
def outer_steps_with(at: RuleContext) -> Iterator[Violation]:
    """Routers' loads, loss scales and fp8 scales are shared by all ranks in every step; outer weights are in fp32."""
    steps = at.spec.parallel.outer_steps
    for refused in _REFUSED:
        if steps and refused.holds(at.spec):
            value = value_at(at.spec, refused.key)
            yield Violation(
                refused.key,
                f"outer_steps {steps} does not work with {refused.key}={as_override(value)}",
                {"outer_steps": steps, "value": value},
                ({refused.key: refused.instead}, _OFF),
            )


@rule("parallel.outer_steps_by_validation", "Validations and evaluations are at outer steps.")
def outer_steps_by_validation(at: RuleContext) -> Iterator[Violation]:
    """Between outer steps each replica has other weights, of which no loss is that of the model."""
    train, steps = at.spec.train, at.spec.parallel.outer_steps
    intervals = {"train.validation_interval": train.validation_interval}
    if train.eval_tasks.names:
        intervals["train.eval_tasks.interval"] = train.eval_tasks.interval
    for key, interval in intervals.items():
        if steps and interval % steps:
            yield Violation(
                key,
                f"{key}={interval} is no multiple of outer_steps {steps}: the replicas' weights differ there",
                {"interval": interval, "outer_steps": steps},
                (*multiples(key, interval, steps), {key: 0}),
            )


register_inert(
    InertSetting(
        "parallel.outer_idle",
        "outer_lr and outer_momentum are set only with outer_steps.",
        "They are those of outer steps.",
        ("parallel.outer_lr", "parallel.outer_momentum"),
        "parallel.outer_steps",
        lambda spec: spec.parallel.outer_steps > 0,
        "parallel.outer_steps is 0",
    )
)
