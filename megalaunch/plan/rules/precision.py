"""Rules of number formats other than fp8: what goes together, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.dependent import Dependent, depends
from megalaunch.plan.rules.registry import Broken, Situation, rule

depends(
    Dependent(
        "precision.loss_scale_idle",
        "Loss scaling goes with fp16.",
        "Other formats have the range of fp32.",
        ("precision.loss_scale.",),
        "precision.compute",
        lambda spec: spec.precision.compute == "fp16",
        "precision.compute is not fp16",
    )
)
depends(
    Dependent(
        "precision.residual_idle",
        "A residual stream in fp32 stands beside a narrower format.",
        "Where all is fp32, so is the stream.",
        ("precision.residual",),
        "precision.compute",
        lambda spec: spec.precision.compute != "fp32",
        "precision.compute is fp32 already",
    )
)


@rule("precision.master_narrower", "Weights are kept in no narrower format than they are used in.")
def master_narrower(at: Situation) -> Iterator[Broken]:
    """Copies in fp32 of weights in bf16 have no more digits than these."""
    precision = at.spec.precision
    if precision.compute == "fp32" and precision.master != "fp32":
        yield Broken(
            "precision.master",
            f"matmuls are in fp32, of weights that are kept in {precision.master}",
            fixes=({"precision.master": "fp32"}, {"precision.compute": "bf16"}),
            severity="warning",
        )


@rule("precision.scale_limits", "The first loss scale is no smaller than the smallest.")
def scale_limits(at: Situation) -> Iterator[Broken]:
    """It only falls from there when gradients overflow."""
    scale = at.spec.precision.loss_scale
    if at.spec.precision.compute == "fp16" and scale.initial < scale.minimum:
        yield Broken(
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
def scale_vanishes(at: Situation) -> Iterator[Broken]:
    """Halved often enough it would: then every gradient is 0, and nothing says so."""
    if at.spec.precision.compute == "fp16" and at.spec.precision.loss_scale.minimum == 0:
        yield Broken(
            "precision.loss_scale.minimum",
            "with a smallest scale of 0 a run of overflows ends in gradients of 0",
            {"minimum": 0.0},
            ({"precision.loss_scale.minimum": 1.0},),
            severity="warning",
        )


@rule("precision.reduce_narrower", "Gradients are summed in no narrower format than they are computed in.")
def reduce_narrower(at: Situation) -> Iterator[Broken]:
    """Who computes in fp32 wants its digits."""
    precision = at.spec.precision
    if precision.compute == "fp32" and precision.reduce != "fp32":
        yield Broken(
            "precision.reduce",
            f"gradients are computed in fp32 and summed over ranks in {precision.reduce}",
            fixes=({"precision.reduce": "fp32"}, {"precision.compute": "bf16"}),
            severity="warning",
        )


@rule("precision.gradients_narrower", "Gradients are kept in no narrower format than they are computed in.")
def gradients_narrower(at: Situation) -> Iterator[Broken]:
    """Added up in bf16, small microbatches' gradients vanish beside the sum."""
    precision = at.spec.precision
    if precision.compute == "fp32" and precision.gradients != "fp32":
        yield Broken(
            "precision.gradients",
            f"gradients are computed in fp32 and kept in {precision.gradients}",
            fixes=({"precision.gradients": "fp32"}, {"precision.compute": "bf16"}),
            severity="warning",
        )


@rule("precision.gradients_lost", "Many microbatches are added up in fp32.")
def gradients_lost(at: Situation) -> Iterator[Broken]:
    """bf16 has 8 bits: from about 256 equal terms on, one more changes nothing."""
    precision, count = at.spec.precision, at.microbatches
    if precision.compute != "fp32" and precision.gradients == "bf16" and count is not None and count > 64:
        yield Broken(
            "precision.gradients",
            f"gradients of {count} microbatches are added up in bf16, whose 8 bits lose the last ones",
            {"microbatches": count},
            ({"precision.gradients": "fp32"},),
            severity="warning",
        )


@rule("precision.moments_by_gradients", "A second moment in bf16 changes although its decay is close to 1.")
def moments_by_gradients(at: Situation) -> Iterator[Broken]:
    """One step changes it by 1 - beta2 at most: below 2^-8 the change is lost in rounding to bf16."""
    optimizer, moments = at.spec.optimizer, at.spec.precision.moments
    if moments == "bf16" and optimizer.name == "adamw" and 1 > optimizer.beta2 > 1 - 2**-8:
        yield Broken(
            "precision.moments",
            f"with beta2 {optimizer.beta2:g} one step changes the second moment by less than bf16 can hold",
            {"beta2": optimizer.beta2},
            ({"precision.moments": "fp32"}, {"optimizer.beta2": 0.95}),
            severity="warning",
        )


@rule("precision.scale_falls", "The loss scale falls at least as readily as it rises.")
def scale_falls(at: Situation) -> Iterator[Broken]:
    """`hysteresis` overflows halve it, `window` steps without one double it."""
    scale = at.spec.precision.loss_scale
    if at.spec.precision.compute == "fp16" and scale.hysteresis >= scale.window:
        yield Broken(
            "precision.loss_scale.hysteresis",
            f"the scale doubles after {scale.window} steps without overflow and halves after {scale.hysteresis} with: "
            "most steps would be skipped",
            {"hysteresis": scale.hysteresis, "window": scale.window},
            ({"precision.loss_scale.hysteresis": 2}, {"precision.loss_scale.window": 1000}),
            severity="warning",
        )
