"""Loss scaling: fp16 has so few exponents that small gradients would be 0 (Micikevicius et al. 2018).

The loss is multiplied by the scale before backward, and the gradients are divided by it in the update. Gradients that
overflow skip the update. The rules of a dynamic scale are those of Megatron-LM's `DynamicGradScaler`, with its factors
2 and 1/2; a constant one stays, as with its `ConstantGradScaler`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megalaunch.schema.precision import LossScaleSpec, PrecisionSpec

_GROWTH, _BACKOFF = 2.0, 0.5


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, the same on all ranks.

    Attributes:
        scale: The factor of the loss.
        good_steps: Steps without overflow since the last overflow or growth.
        overflows_left: Overflows until the scale falls; at 0 or below every overflow lowers it. Only growth resets it.
    """

    scale: float
    good_steps: int
    overflows_left: int

    @classmethod
    def initial(cls, precision: PrecisionSpec) -> LossScale | None:
        """Return the scale of the first step; None for dtypes other than fp16."""
        spec = precision.loss_scale
        if precision.compute_dtype != "fp16":
            return None
        return cls(spec.initial if spec.constant is None else spec.constant, 0, spec.hysteresis)

    @classmethod
    def from_document(cls, document: Any) -> LossScale:
        """Return the scale in a checkpoint's document. Raises ValueError if it holds none."""
        match document:
            case {"scale": float(scale), "good_steps": int(good_steps), "overflows_left": int(left)} if scale > 0:
                return cls(scale, good_steps, left)
        raise ValueError("no valid loss scale")

    def is_exhausted(self, spec: LossScaleSpec) -> bool:
        """Return whether the next overflow should lower a dynamic scale, but it is at its minimum."""
        return spec.constant is None and self.scale <= spec.minimum and self.overflows_left <= 1

    def after_overflow(self, spec: LossScaleSpec) -> LossScale:
        """Return the scale after a step whose gradients overflowed."""
        if spec.constant is not None:
            return self
        left = self.overflows_left - 1
        scale = max(self.scale * _BACKOFF, spec.minimum) if left <= 0 else self.scale
        return LossScale(scale, 0, left)

    def after_update(self, spec: LossScaleSpec) -> LossScale:
        """Return the scale after a step without overflow."""
        if spec.constant is not None:
            return self
        if self.good_steps + 1 < spec.window:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(self.scale * _GROWTH, 0, spec.hysteresis)


@dataclass(frozen=True)
class UpdateState:
    """What earlier steps leave for the updates of later ones: the number of skipped steps, and the scale of fp16."""

    skipped_steps: int = 0
    loss_scale: LossScale | None = None

    def with_scale(self, precision: PrecisionSpec) -> UpdateState:
        """Return this state with a scale that the precision allows: its own if it is dynamic, else the initial one."""
        initial = LossScale.initial(precision)
        keeps = initial is not None and self.loss_scale is not None and precision.loss_scale.constant is None
        return self if keeps else replace(self, loss_scale=initial)

    @property
    def factor(self) -> float:
        """The factor of the loss in the next step."""
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def may_skip(self, spec: LossScaleSpec) -> bool:
        """Return whether gradients that are not finite skip the step: in fp16, until the scale is exhausted."""
        return self.loss_scale is not None and not self.loss_scale.is_exhausted(spec)

    def after(self, spec: LossScaleSpec, *, skipped: bool, overflowed: bool) -> UpdateState:
        """Return the state after a step; one may be skipped without overflow (`optimizer.skip_step_grad_norm`)."""
        scale = self.loss_scale
        if scale is not None:
            scale = scale.after_overflow(spec) if overflowed else scale.after_update(spec)
        return UpdateState(self.skipped_steps + skipped, scale)
