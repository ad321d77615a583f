"""Rules of the update rule and its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.config.schema import RunSpec
from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS


@rule("optimizer.betas", "The decays of the moments are below 1.")
def betas(at: RuleContext) -> Iterator[Violation]:
    """At 1 a moment never learns anything."""
    for name, usual in (("beta1", 0.9), ("beta2", 0.95)):
        value = getattr(at.spec.optimizer, name)
        if value >= 1:
            yield Violation(
                f"optimizer.{name}",
                f"{name} {value:g} must be below 1",
                {name: value},
                ({f"optimizer.{name}": usual},),
            )


@rule("optimizer.momentum", "The decay of the momentum is below 1.")
def momentum(at: RuleContext) -> Iterator[Violation]:
    """At 1 the first gradient is never forgotten, above it grows without bound."""
    optimizer = at.spec.optimizer
    if optimizer.name in ("sgd", "muon") and optimizer.momentum >= 1:
        yield Violation(
            "optimizer.momentum",
            f"momentum {optimizer.momentum:g} must be below 1",
            {"momentum": optimizer.momentum},
            ({"optimizer.momentum": 0.95}, {"optimizer.momentum": 0.9}),
        )


@rule("optimizer.rate", "The learning rate is above 0.")
def rate(at: RuleContext) -> Iterator[Violation]:
    """At 0 nothing is learned; for a measurement that may be what is meant."""
    if at.spec.optimizer.lr == 0:
        yield Violation(
            "optimizer.lr",
            "a learning rate of 0 learns nothing",
            {"lr": 0.0},
            ({"optimizer.lr": 3e-4},),
            severity="warning",
        )


_TOO_HIGH = {"adamw": 0.1, "lion": 0.1, "muon": 1.0}
"""By update rule: a learning rate at which one step moves weights further than they are usually large."""


@rule("optimizer.rate_too_high", "One step moves a weight by less than its usual size.")
def rate_too_high(at: RuleContext) -> Iterator[Violation]:
    """AdamW and Lion move each weight by up to lr, and weights begin near 0.02: training diverges at once."""
    optimizer = at.spec.optimizer
    for key in ("lr", "embedding_lr"):
        lr = getattr(optimizer, key)
        if lr is not None and lr >= _TOO_HIGH.get(optimizer.name, float("inf")):
            usual = 0.02 if optimizer.name == "muon" else 3e-4
            lower = {f"optimizer.{key}": usual}
            yield Violation(
                f"optimizer.{key}",
                f"{key} {lr:g} moves a weight by up to {lr:g} a step with {optimizer.name}, and weights begin near "
                f"{at.spec.model.init_std:g}: the loss will rise",
                {key: lr, "init_std": at.spec.model.init_std},
                (lower, {f"optimizer.{key}": 10 * usual}, {**lower, "schedule.min_lr": 0.0}),
                severity="warning",
            )


@rule("optimizer.epsilon", "Adam divides by more than 0.")
def epsilon(at: RuleContext) -> Iterator[Violation]:
    """A token that a batch lacks has a gradient of 0 and a second moment of 0: its embedding would become NaN."""
    optimizer = at.spec.optimizer
    if optimizer.name in ("adamw", "muon") and optimizer.epsilon == 0:
        yield Violation(
            "optimizer.epsilon",
            "with epsilon 0 the embedding of a token that the first batch lacks becomes 0 / 0",
            {"epsilon": 0.0},
            ({"optimizer.epsilon": 1e-8},),
        )


@rule("optimizer.decay_by_rate", "One step's weight decay takes less than all of a weight.")
def decay_by_rate(at: RuleContext) -> Iterator[Violation]:
    """Decoupled decay multiplies every weight by 1 - lr * weight_decay: at or below 0 nothing of it is left."""
    lr, decay = at.spec.optimizer.lr, at.spec.optimizer.weight_decay
    if lr * decay >= 1:
        yield Violation(
            "optimizer.weight_decay",
            f"lr {lr:g} x weight_decay {decay:g} = {lr * decay:g} leaves nothing of a weight in one step",
            {"lr": lr, "weight_decay": decay},
            ({"optimizer.weight_decay": 0.1}, {"optimizer.lr": 3e-4}),
        )


@rule("optimizer.skip_all", "Some gradient is small enough to be used.")
def skip_all(at: RuleContext) -> Iterator[Violation]:
    """Every norm is above 0, so a limit of 0 skips every step."""
    if at.spec.optimizer.skip_step_grad_norm == 0:
        yield Violation(
            "optimizer.skip_step_grad_norm",
            "skip_step_grad_norm 0 skips every step",
            {"skip_step_grad_norm": 0.0},
            ({"optimizer.skip_step_grad_norm": None}, {"optimizer.skip_step_grad_norm": 10.0}),
        )


@rule("optimizer.skip_by_clip", "Steps are skipped for norms above those that are clipped.")
def skip_by_clip(at: RuleContext) -> Iterator[Violation]:
    """What would be clipped is skipped before: clipping never happens, and most early steps are lost."""
    skip, clip = at.spec.optimizer.skip_step_grad_norm, at.spec.optimizer.clip_grad
    if skip is not None and 0 < skip <= clip:
        yield Violation(
            "optimizer.skip_step_grad_norm",
            f"a norm above {skip:g} skips the step, so that none is ever clipped to {clip:g}",
            {"skip_step_grad_norm": skip, "clip_grad": clip},
            ({"optimizer.skip_step_grad_norm": 10 * clip}, {"optimizer.clip_grad": 0.0}),
            severity="warning",
        )


@rule("optimizer.offload_needs_adam", "Optimizer states in host memory are Adam's.")
def offload_needs_adam(at: RuleContext) -> Iterator[Violation]:
    """The host's update exists for AdamW alone, as in Megatron."""
    optimizer = at.spec.optimizer
    if optimizer.optimizer_offload_fraction > 0 and optimizer.name != "adamw":
        yield Violation(
            "optimizer.optimizer_offload_fraction",
            f"optimizer_offload_fraction {optimizer.optimizer_offload_fraction:g} needs optimizer.name=adamw, "
            f"and it is {optimizer.name}",
            {"optimizer_offload_fraction": optimizer.optimizer_offload_fraction},
            ({"optimizer.optimizer_offload_fraction": 0.0}, {"optimizer.name": "adamw"}),
        )


@rule("optimizer.exp_avg_needs_adam", "Moments in bf16 are Adam's.")
def exp_avg_needs_adam(at: RuleContext) -> Iterator[Violation]:
    """Lion's sign and muon's orthogonal matrix magnify what rounding changes in a small moment."""
    name, moments = at.spec.optimizer.name, at.spec.precision.exp_avg_dtype
    if moments != "fp32" and name != "adamw":
        yield Violation(
            "precision.exp_avg_dtype",
            f"moments in {moments} are made for adamw, and the optimizer is {name}",
            fixes=({"precision.exp_avg_dtype": "fp32"}, {"optimizer.name": "adamw"}),
        )


@rule("optimizer.scaled_loss", "With a scaled loss the optimizer is Adam or SGD.")
def scaled_loss(at: RuleContext) -> Iterator[Violation]:
    """As in Megatron: fp16's skipped steps and lion's or muon's updates, whose size ignores the gradient's, are a pair
    that nobody has tuned.
    """
    name = at.spec.optimizer.name
    if at.spec.precision.compute_dtype == "fp16" and name in ("lion", "muon"):
        yield Violation(
            "optimizer.name",
            f"{name} is not made for fp16 and its loss scaling",
            fixes=({"precision.compute_dtype": "bf16"}, {"optimizer.name": "adamw"}),
        )


@rule("optimizer.whole_matrices", "Muon's matrices are whole where they are updated.")
def whole_matrices(at: RuleContext) -> Iterator[Violation]:
    """It orthogonalises each matrix: under full sharding every update gathers all of them once more."""
    p = at.spec.parallel
    if at.spec.optimizer.name == "muon" and p.data_sharding == "optim_grads_params" and (at.dp or 1) > 1:
        yield Violation(
            "parallel.data_sharding",
            f"muon gathers every matrix again for its update, since parameters are sharded over dp {at.dp}",
            {"dp": at.dp},
            ({"parallel.data_sharding": "optim"}, {"parallel.data_sharding": "optim_grads"}),
            severity="warning",
        )


def _offloads_from_a_device(spec: RunSpec) -> bool:
    chip = CHIPS.get(spec.platform.chip)
    return chip is None or chip.device != "cpu"


register_inert(
    InertSetting(
        "optimizer.offload_idle",
        "Host memory is another memory than the device's.",
        "On a processor they are the same.",
        ("optimizer.optimizer_offload_fraction", "recompute.cpu_offloading_num_layers"),
        "platform.chip",
        _offloads_from_a_device,
        "the run is made for a processor, whose memory is the host's",
    )
)
register_inert(
    InertSetting(
        "optimizer.momentum_idle",
        "momentum belongs to sgd and muon.",
        "The others have their betas.",
        ("optimizer.momentum",),
        "optimizer.name",
        lambda spec: spec.optimizer.name in ("sgd", "muon"),
        "the optimizer is neither sgd nor muon (its moments: optimizer.beta1)",
    )
)
register_inert(
    InertSetting(
        "optimizer.betas_idle",
        "Betas and epsilon belong to adamw, lion and muon.",
        "sgd has one momentum.",
        ("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"),
        "optimizer.name",
        lambda spec: spec.optimizer.name != "sgd",
        "the optimizer is sgd",
        severity="note",
    )
)
