"""Rules of dtypes other than fp8, and of loss scaling."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.no_effect import InertSetting, on_cpu, register_inert
from megalaunch.plan.rules.registry import Fix, RuleContext, Violation, rule
from megalaunch.platform.chips import CHIPS
from megalaunch.schema import RunSpec


def _has_dynamic_scale(spec: RunSpec) -> bool:
    return spec.precision.compute_dtype == "fp16" and spec.precision.loss_scale.constant is None


def _has_tf32(spec: RunSpec) -> bool:
    chip = CHIPS.get(spec.platform.chip)
    return not on_cpu(spec) and not (chip is not None and chip.lacks_tf32)


register_inert(
    InertSetting(
        "precision.loss_scale_idle",
        "precision.loss_scale is set only for fp16.",
        "Other dtypes have the range of fp32.",
        ("precision.loss_scale.",),
        "precision.compute_dtype",
        lambda spec: spec.precision.compute_dtype == "fp16",
        "precision.compute_dtype is not fp16",
    )
)
register_inert(
    InertSetting(
        "precision.dynamic_scale_idle",
        "The settings of the dynamic loss scale are set only without loss_scale.constant.",
        "A constant scale neither grows nor falls.",
        tuple(f"precision.loss_scale.{name}" for name in ("initial", "minimum", "window", "hysteresis")),
        "precision.loss_scale.constant",
        lambda spec: spec.precision.compute_dtype != "fp16" or spec.precision.loss_scale.constant is None,
        "the loss scale is constant (precision.loss_scale.constant)",
        ({"precision.loss_scale.constant": None},),
    )
)
register_inert(
    InertSetting(
        "precision.residual_idle",
        "precision.residual_dtype is set only with a narrower compute_dtype.",
        "With compute_dtype=fp32 the residual stream is fp32 already.",
        ("precision.residual_dtype",),
        "precision.compute_dtype",
        lambda spec: spec.precision.compute_dtype != "fp32",
        "precision.compute_dtype is fp32 already",
    )
)

register_inert(
    InertSetting(
        "precision.tf32_idle",
        "precision.tf32 is set only for GPUs that have TF32.",
        "CPUs have none; NVIDIA's GPUs have it from Ampere on.",
        ("precision.tf32",),
        "platform.chip",
        _has_tf32,
        "CPUs, and GPUs before Ampere, compute fp32 matmuls in fp32",
    )
)


@rule("precision.bf16_chip", "The chip has units for bf16, if the run computes in it.")
def bf16_chip(at: RuleContext) -> Iterator[Violation]:
    """Tensor cores of Volta and Turing multiply fp16 only; bf16 would be computed without them. With fp8, emulated, the
    rest of the model computes in bf16.
    """
    chip, precision = CHIPS.get(at.spec.platform.chip), at.spec.precision
    emulated = precision.compute_dtype == "fp8" and precision.emulate
    if chip is None or not chip.lacks_bf16 or not (precision.compute_dtype == "bf16" or emulated):
        return
    narrow: Fix = {"precision.emulate": False, "precision.main_params_dtype": "fp32"}
    formats = [name for name in ("fp16", "fp32") if name in chip.peak_flops]
    yield Violation(
        "precision.compute_dtype",
        f"{chip.name} has no bf16 units: it computes in {' and '.join(chip.peak_flops)}",
        fixes=tuple({"precision.compute_dtype": name, **narrow} for name in formats),
    )


@rule("precision.main_params_narrower", "main_params_dtype is not narrower than compute_dtype.")
def main_params_narrower(at: RuleContext) -> Iterator[Violation]:
    """Copies of bf16 weights in a dtype with more digits have no more precision than these."""
    precision = at.spec.precision
    if precision.compute_dtype in ("fp32", "fp16") and precision.main_params_dtype != "fp32":
        yield Violation(
            "precision.main_params_dtype",
            f"compute_dtype is {precision.compute_dtype}, but main_params_dtype is {precision.main_params_dtype}",
            fixes=({"precision.main_params_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.main_params_rounding", "With main_params_dtype=bf16 lr is at least 2^-9 of the usual weight.")
def main_params_rounding(at: RuleContext) -> Iterator[Violation]:
    """AdamW and Lion change a weight by about lr. bf16 rounds to the nearest of 8 bits: less than 2^-9 of the weight is
    lost in every step, not accumulated.
    """
    optimizer, usual = at.spec.optimizer, at.spec.model.init_std
    if at.spec.precision.main_params_dtype == "bf16" and optimizer.name in ("adamw", "lion"):
        least = usual * 2**-9
        if 0 < optimizer.lr < least:
            yield Violation(
                "precision.main_params_dtype",
                f"with lr {optimizer.lr:g} a step changes a weight of usual size {usual:g} by less than half of what "
                f"bf16 resolves, {least:.2g}: weights stop changing",
                {"lr": optimizer.lr, "init_std": usual, "least": least},
                ({"precision.main_params_dtype": "fp32"}, {"optimizer.lr": 3e-4}),
                severity="warning",
            )


@rule("precision.scale_limits", "loss_scale.initial is at least loss_scale.minimum.")
def scale_limits(at: RuleContext) -> Iterator[Violation]:
    """The scale only falls when gradients overflow."""
    scale = at.spec.precision.loss_scale
    if _has_dynamic_scale(at.spec) and scale.initial < scale.minimum:
        yield Violation(
            "precision.loss_scale.initial",
            f"loss_scale.initial {scale.initial:g} is below loss_scale.minimum {scale.minimum:g}",
            {"initial": scale.initial, "minimum": scale.minimum},
            (
                {"precision.loss_scale.minimum": scale.initial},
                {"precision.loss_scale.initial": scale.minimum},
                {"precision.loss_scale.minimum": 1.0},
            ),
        )


@rule("precision.scale_vanishes", "loss_scale.minimum is above 0.")
def scale_vanishes(at: RuleContext) -> Iterator[Violation]:
    """A scale that is halved often enough becomes 0: then every gradient is 0, without an error."""
    if _has_dynamic_scale(at.spec) and at.spec.precision.loss_scale.minimum == 0:
        yield Violation(
            "precision.loss_scale.minimum",
            "with loss_scale.minimum 0 repeated overflows end in gradients of 0",
            {"minimum": 0.0},
            ({"precision.loss_scale.minimum": 1.0},),
            severity="warning",
        )


@rule("precision.grad_reduce_narrower", "grad_reduce_dtype is not narrower than compute_dtype.")
def grad_reduce_narrower(at: RuleContext) -> Iterator[Violation]:
    """A reduction in bf16 discards the precision of fp32 gradients."""
    precision = at.spec.precision
    if precision.compute_dtype == "fp32" and precision.grad_reduce_dtype != "fp32":
        yield Violation(
            "precision.grad_reduce_dtype",
            f"gradients are computed in fp32 but reduced over ranks in {precision.grad_reduce_dtype}",
            fixes=({"precision.grad_reduce_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.grad_narrower", "grad_dtype is not narrower than compute_dtype.")
def grad_narrower(at: RuleContext) -> Iterator[Violation]:
    """In gradient accumulation in bf16 small gradients of a microbatch are rounded away."""
    precision = at.spec.precision
    if precision.compute_dtype == "fp32" and precision.grad_dtype != "fp32":
        yield Violation(
            "precision.grad_dtype",
            f"gradients are computed in fp32 but accumulated in {precision.grad_dtype}",
            fixes=({"precision.grad_dtype": "fp32"}, {"precision.compute_dtype": "bf16"}),
            severity="warning",
        )


@rule("precision.grad_rounding", "Gradients of many microbatches are accumulated in fp32.")
def grad_rounding(at: RuleContext) -> Iterator[Violation]:
    """bf16 has 8 bits of precision: from about 256 equal terms on, one more changes nothing."""
    precision, count = at.spec.precision, at.microbatches
    if precision.compute_dtype == "fp32" or count is None or count <= 64:
        return
    is_sharded = at.spec.parallel.data_sharding in ("optim_grads", "optim_grads_params")
    key = "precision.main_params_dtype" if is_sharded else "precision.grad_dtype"
    if (precision.main_params_dtype if is_sharded else precision.grad_dtype) == "bf16":
        yield Violation(
            key,
            f"gradients of {count} microbatches are accumulated in bf16, whose 8 bits round the last ones away",
            {"microbatches": count},
            ({key: "fp32"},),
            severity="warning",
        )


@rule("precision.exp_avg_by_grad", "With exp_avg_dtype=bf16 beta2 is at most 1 - 2^-8.")
def exp_avg_by_grad(at: RuleContext) -> Iterator[Violation]:
    """A step changes a moment that beta2 decays by a share of about 1 - beta2: rounding to bf16 loses it below 2^-8.

    Such are AdamW's second moment and Lion's momentum.
    """
    optimizer, moments = at.spec.optimizer, at.spec.precision.exp_avg_dtype
    if moments == "bf16" and optimizer.name in ("adamw", "lion") and 1 > optimizer.beta2 > 1 - 2**-8:
        moment = "momentum" if optimizer.name == "lion" else "second moment"
        yield Violation(
            "precision.exp_avg_dtype",
            f"with beta2 {optimizer.beta2:g} one step changes the {moment} by less than bf16 resolves",
            {"beta2": optimizer.beta2},
            ({"precision.exp_avg_dtype": "fp32"}, {"optimizer.beta2": 0.95}),
            severity="warning",
        )


@rule("precision.scale_falls", "loss_scale.hysteresis is below loss_scale.window.")
def scale_falls(at: RuleContext) -> Iterator[Violation]:
    """`hysteresis` overflows halve the scale, `window` steps without overflow double it."""
    scale = at.spec.precision.loss_scale
    if _has_dynamic_scale(at.spec) and scale.hysteresis >= scale.window:
        yield Violation(
            "precision.loss_scale.hysteresis",
            f"the scale doubles after {scale.window} steps without overflow, but halves only after "
            f"{scale.hysteresis} overflows: most steps would be skipped",
            {"hysteresis": scale.hysteresis, "window": scale.window},
            ({"precision.loss_scale.hysteresis": 2}, {"precision.loss_scale.window": 1000}),
            severity="warning",
        )
