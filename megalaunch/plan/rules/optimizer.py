"""Rules of the optimizer and its hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec


@rule("optimizer.betas", "beta1 and beta2 are below 1.")
def betas(at: RuleContext) -> Iterator[Violation]:
    """At 1 a moment never changes."""
    for name, usual in (("beta1", 0.9), ("beta2", 0.95)):
        value = getattr(at.spec.optimizer, name)
        if value >= 1:
            yield Violation(
                f"optimizer.{name}",
                f"{name} {value:g} must be below 1",
                {name: value},
                ({f"optimizer.{name}": usual},),
            )


@rule("optimizer.momentum", "optimizer.momentum is below 1.")
def momentum(at: RuleContext) -> Iterator[Violation]:
    """At 1 the first gradient never decays; above 1 the momentum grows without bound."""
    optimizer = at.spec.optimizer
    if optimizer.name in ("sgd", "muon") and optimizer.momentum >= 1:
        yield Violation(
            "optimizer.momentum",
            f"momentum {optimizer.momentum:g} must be below 1",
            {"momentum": optimizer.momentum},
            ({"optimizer.momentum": 0.95}, {"optimizer.momentum": 0.9}),
        )


@rule("optimizer.rate", "optimizer.lr is above 0.")
def rate(at: RuleContext) -> Iterator[Violation]:
    """At 0 nothing is learned, which may be intended for a measurement."""
    if at.spec.optimizer.lr == 0:
        yield Violation(
            "optimizer.lr",
            "lr 0 learns nothing",
            {"lr": 0.0},
            ({"optimizer.lr": 3e-4},),
            severity="warning",
        )


_TOO_HIGH = {"adamw": 0.1, "lion": 0.1, "muon": 1.0}
"""By optimizer: the learning rate at which one step changes a weight by more than its usual size."""


@rule("optimizer.rate_too_high", "One step changes a weight by less than its usual size.")
def rate_too_high(at: RuleContext) -> Iterator[Violation]:
    """AdamW and Lion change each weight by up to lr, and initial weights are near 0.02: training diverges at once."""
    optimizer = at.spec.optimizer
    for key in ("lr", "embedding_lr"):
        lr = getattr(optimizer, key)
        if lr is not None and lr >= _TOO_HIGH.get(optimizer.name, float("inf")):
            usual = 0.02 if optimizer.name == "muon" else 3e-4
            lower = {f"optimizer.{key}": usual}
            yield Violation(
                f"optimizer.{key}",
                f"{key} {lr:g} changes a weight by up to {lr:g} per step with {optimizer.name}, "
                f"but initial weights are near {at.spec.model.init_std:g}: training will diverge",
                {key: lr, "init_std": at.spec.model.init_std},
                (lower, {f"optimizer.{key}": 10 * usual}, {**lower, "schedule.min_lr": 0.0}),
                severity="warning",
            )


@rule("optimizer.epsilon", "optimizer.epsilon is above 0.")
def epsilon(at: RuleContext) -> Iterator[Violation]:
    """A token that is not in the batch has zero gradient and zero second moment: its embedding would become NaN."""
    optimizer = at.spec.optimizer
    if optimizer.name in ("adamw", "muon") and optimizer.epsilon == 0:
        yield Violation(
            "optimizer.epsilon",
            "with epsilon 0 the embedding of a token that is not in the first batch becomes 0 / 0",
            {"epsilon": 0.0},
            ({"optimizer.epsilon": 1e-8},),
        )


@rule("optimizer.decay_by_rate", "lr x weight_decay is below 1.")
def decay_by_rate(at: RuleContext) -> Iterator[Violation]:
    """Decoupled weight decay multiplies every weight by 1 - lr * weight_decay, which would be 0 or negative."""
    grows, lr = at.spec.schedule.weight_decay_grows, at.spec.optimizer.lr
    key = "schedule.end_weight_decay" if grows else "optimizer.weight_decay"
    decay = (at.spec.schedule.end_weight_decay or 0.0) if grows else at.spec.optimizer.weight_decay
    if lr * decay >= 1:
        name = key.partition(".")[2]
        yield Violation(
            key,
            f"lr {lr:g} x {name} {decay:g} = {lr * decay:g} removes a weight entirely in one step",
            {"lr": lr, name: decay},
            ({key: 0.1}, {"optimizer.lr": 3e-4}),
        )


@rule("optimizer.skip_all", "skip_step_grad_norm is above 0.")
def skip_all(at: RuleContext) -> Iterator[Violation]:
    """Every gradient norm is above 0, so a limit of 0 skips every step."""
    if at.spec.optimizer.skip_step_grad_norm == 0:
        yield Violation(
            "optimizer.skip_step_grad_norm",
            "skip_step_grad_norm 0 skips every step",
            {"skip_step_grad_norm": 0.0},
            ({"optimizer.skip_step_grad_norm": None}, {"optimizer.skip_step_grad_norm": 10.0}),
        )


@rule("optimizer.skip_by_clip", "skip_step_grad_norm is above clip_grad.")
def skip_by_clip(at: RuleContext) -> Iterator[Violation]:
    """Otherwise steps are skipped before they could be clipped, and most early steps are lost."""
    skip, clip = at.spec.optimizer.skip_step_grad_norm, at.spec.optimizer.clip_grad
    if skip is not None and 0 < skip <= clip:
        yield Violation(
            "optimizer.skip_step_grad_norm",
            f"a norm above {skip:g} skips the step, so none is ever clipped to {clip:g}",
            {"skip_step_grad_norm": skip, "clip_grad": clip},
            ({"optimizer.skip_step_grad_norm": 10 * clip}, {"optimizer.clip_grad": 0.0}),
            severity="warning",
        )


@rule("optimizer.offload_needs_adam", "optimizer_offload_fraction is above 0 only for adamw.")
def offload_needs_adam(at: RuleContext) -> Iterator[Violation]:
    """As in Megatron-LM, the update on the host supports AdamW only."""
    optimizer = at.spec.optimizer
    if optimizer.optimizer_offload_fraction > 0 and optimizer.name != "adamw":
        yield Violation(
            "optimizer.optimizer_offload_fraction",
            f"optimizer_offload_fraction {optimizer.optimizer_offload_fraction:g} needs optimizer.name=adamw, "
            f"but it is {optimizer.name}",
            {"optimizer_offload_fraction": optimizer.optimizer_offload_fraction},
            ({"optimizer.optimizer_offload_fraction": 0.0}, {"optimizer.name": "adamw"}),
        )


@rule("optimizer.exp_avg_of_muon", "exp_avg_dtype is fp32 for muon.")
def exp_avg_of_muon(at: RuleContext) -> Iterator[Violation]:
    """Orthogonalization amplifies the rounding of small directions, and takes them whole: not in pieces in fp32."""
    name, moments = at.spec.optimizer.name, at.spec.precision.exp_avg_dtype
    if moments != "fp32" and name == "muon":
        yield Violation(
            "precision.exp_avg_dtype",
            f"exp_avg_dtype={moments} is for adamw, lion and sgd, but the optimizer is muon",
            fixes=({"precision.exp_avg_dtype": "fp32"}, {"optimizer.name": "adamw"}),
        )


def _offloads_from_a_device(spec: RunSpec) -> bool:
    chip = CHIPS.get(spec.platform.chip)
    return chip is None or chip.device != "cpu"


register_inert(
    InertSetting(
        "optimizer.offload_idle",
        "Offloading to host memory is set only for accelerators.",
        "The memory of a CPU is the host memory.",
        ("optimizer.optimizer_offload_fraction", "recompute.cpu_offloading_num_layers"),
        "platform.chip",
        _offloads_from_a_device,
        "the run is on CPU, whose memory is the host memory",
    )
)
register_inert(
    InertSetting(
        "optimizer.momentum_idle",
        "momentum and nesterov are set only for sgd and muon.",
        "The other optimizers have betas.",
        ("optimizer.momentum", "optimizer.nesterov"),
        "optimizer.name",
        lambda spec: spec.optimizer.name in ("sgd", "muon"),
        "the optimizer is neither sgd nor muon (its moments: optimizer.beta1)",
    )
)
register_inert(
    InertSetting(
        "optimizer.weight_decay_idle",
        "optimizer.weight_decay is set only if the weight decay is constant.",
        "A growing one has a start and an end.",
        ("optimizer.weight_decay",),
        "schedule.weight_decay_incr_style",
        lambda spec: not spec.schedule.weight_decay_grows,
        "the weight decay grows from schedule.start_weight_decay to schedule.end_weight_decay",
        ({"schedule.weight_decay_incr_style": "constant"},),
        severity="note",
    )
)
register_inert(
    InertSetting(
        "optimizer.qk_layernorm_idle",
        "apply_wd_to_qk_layernorm is set only for models with QK norm.",
        "The norms of latent attention's latents have no weight decay either.",
        ("optimizer.apply_wd_to_qk_layernorm",),
        "model.qk_norm",
        lambda spec: spec.model.qk_norm != "none",
        "the model has no QK norm (model.qk_norm)",
    )
)
register_inert(
    InertSetting(
        "optimizer.muon_idle",
        "The muon settings are set only for muon.",
        "The other optimizers do not orthogonalize.",
        ("optimizer.muon_num_ns_steps", "optimizer.muon_scale_mode", "optimizer.muon_extra_scale_factor"),
        "optimizer.name",
        lambda spec: spec.optimizer.name == "muon",
        "the optimizer is not muon",
        ({"optimizer.name": "muon"},),
    )
)
register_inert(
    InertSetting(
        "optimizer.betas_idle",
        "Betas and epsilon are set only for adamw, lion and muon.",
        "sgd has one momentum.",
        ("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon"),
        "optimizer.name",
        lambda spec: spec.optimizer.name != "sgd",
        "the optimizer is sgd",
        severity="note",
    )
)
