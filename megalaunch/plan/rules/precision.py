"""Rules of number formats other than fp8: what goes together, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, register_inert
from megalaunch.plan.rules.registry import RuleContext, Violation, rule

register_inert(
    InertSetting(
        "precision.loss_scale_idle",
        "Loss scaling goes with fp16.",
        "Other formats have the range of fp32.",
        ("precision.loss_scale.",),
        "precision.compute_dtype",
        lambda spec: spec.precision.compute_dtype == "fp16",
        "precision.compute_dtype is not fp16",
    )
)
register_inert(
    InertSetting(
        "precision.residual_idle",
        "A residual stream in fp32 stands beside a narrower format.",
        "Where all is fp32, so is the stream.",
        ("precision.residual_dtype",),
        "precision.compute_dtype",
        lambda spec: spec.precision.compute_dtype != "fp32",
        "precision.compute_dtype is fp32 already",
    )
)


@rule("precision.main_params_narrower", "Weights are kept in no narrower format than they are used in.")
def main_params_narrower(at: RuleContext) -> Iterator[Violation]:
    """Copies in fp32 of weights in bf16 have no more digits than these."""
    precision = at.spec.precision
    if precision.compute_dtype == "fp32" and precision.main_params_dtype != "fp32":
        yield Violation(
            "precision.main_params_dtype",
            f"matmuls are in fp32, of weights that are kept in {precision.main_params_dtype}",
            fixes=({"precision.main_params_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.scale_limits", "The first loss scale is no smaller than the smallest.")
def scale_limits(at: RuleContext) -> Iterator[Violation]:
    """It only falls from there when gradients overflow."""
    scale = at.spec.precision.loss_scale
    if at.spec.precision.compute_dtype == "fp16" and scale.initial < scale.minimum:
        yield Violation(
            "precision.loss_scale.initial",
            f"the first scale {scale.initial:g} is smaller than the smallest, {scale.minimum:g}",
            {"initial": scale.initial, "minimum": scale.minimum},
            (
                {"precision.loss_scale.minimum": scale.initial},
                {"precision.loss_scale.initial": scale.minimum},
                {"precision.loss_scale.minimum": 1.0},
            ),
        )


@rule("precision.scale_vanishes", "The loss scale cannot fall to 0.")
def scale_vanishes(at: RuleContext) -> Iterator[Violation]:
    """Halved often enough it would: then every gradient is 0, and nothing says so."""
    if at.spec.precision.compute_dtype == "fp16" and at.spec.precision.loss_scale.minimum == 0:
        yield Violation(
            "precision.loss_scale.minimum",
            "with a smallest scale of 0 a run of overflows ends in gradients of 0",
            {"minimum": 0.0},
            ({"precision.loss_scale.minimum": 1.0},),
            severity="warning",
        )


@rule("precision.grad_reduce_narrower", "Gradients are summed in no narrower format than they are computed in.")
def grad_reduce_narrower(at: RuleContext) -> Iterator[Violation]:
    """Who computes in fp32 wants its digits."""
    precision = at.spec.precision
    if precision.compute_dtype == "fp32" and precision.grad_reduce_dtype != "fp32":
        yield Violation(
            "precision.grad_reduce_dtype",
            f"gradients are computed in fp32 and summed over ranks in {precision.grad_reduce_dtype}",
            fixes=({"precision.grad_reduce_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.grad_narrower", "Gradients are kept in no narrower format than they are computed in.")
def grad_narrower(at: RuleContext) -> Iterator[Violation]:
    """Added up in bf16, small microbatches' gradients vanish beside the sum."""
    precision = at.spec.precision
    if precision.compute_dtype == "fp32" and precision.grad_dtype != "fp32":
        yield Violation(
            "precision.grad_dtype",
            f"gradients are computed in fp32 and kept in {precision.grad_dtype}",
            fixes=({"precision.grad_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.grad_rounding", "Many microbatches are added up in fp32.")
def grad_rounding(at: RuleContext) -> Iterator[Violation]:
    """bf16 has 8 bits: from about 256 equal terms on, one more changes nothing."""
    precision, count = at.spec.precision, at.microbatches
    if precision.compute_dtype != "fp32" and precision.grad_dtype == "bf16" and count is not None and count > 64:
        yield Violation(
            "precision.grad_dtype",
            f"gradients of {count} microbatches are added up in bf16, whose 8 bits lose the last ones",
            {"microbatches": count},
            ({"precision.grad_dtype": "fp32"},),
            severity="warning",
        )


@rule("precision.exp_avg_by_grad", "A second moment in bf16 changes although its decay is close to 1.")
def exp_avg_by_grad(at: RuleContext) -> Iterator[Violation]:
    """One step changes it by 1 - beta2 at most: below 2^-8 the change is lost in rounding to bf16."""
    optimizer, moments = at.spec.optimizer, at.spec.precision.exp_avg_dtype
    if moments == "bf16" and optimizer.name == "adamw" and 1 > optimizer.beta2 > 1 - 2**-8:
        yield Violation(
            "precision.exp_avg_dtype",
            f"with beta2 {optimizer.beta2:g} one step changes the second moment by less than bf16 can hold",
            {"beta2": optimizer.beta2},
            ({"precision.exp_avg_dtype": "fp32"}, {"optimizer.beta2": 0.95}),
            severity="warning",
        )


@rule("precision.scale_falls", "The loss scale falls at least as readily as it rises.")
def scale_falls(at: RuleContext) -> Iterator[Violation]:
    """`hysteresis` overflows halve it, `window` steps without one double it."""
    scale = at.spec.precision.loss_scale
    if at.spec.precision.compute_dtype == "fp16" and scale.hysteresis >= scale.window:
        yield Violation(
            "precision.loss_scale.hysteresis",
            f"the scale doubles after {scale.window} steps without overflow and halves after {scale.hysteresis} with: "
            "most steps would be skipped",
            {"hysteresis": scale.hysteresis, "window": scale.window},
            ({"precision.loss_scale.hysteresis": 2}, {"precision.loss_scale.window": 1000}),
            severity="warning",
        )
