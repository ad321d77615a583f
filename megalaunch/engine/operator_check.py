"""Compare the operators of a platform, forward and backward, with plain torch in fp64 on a CPU.

Vendors' kernels may compute wrong values without an error. Inputs are small and the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megalaunch.engine.platform.platform import Platform
from megalaunch.kernels.causal_attention import causal_sdpa, causal_sdpa_reference
from megalaunch.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from megalaunch.kernels.grouped_linear import grouped_linear, grouped_linear_reference
from megalaunch.kernels.overridable import load_overrides, operator_name
from megalaunch.kernels.rms_norm import rms_norm, rms_norm_reference
from megalaunch.kernels.swiglu import swiglu, swiglu_reference

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 0.02})
"""The largest deviation, as a share of the largest value of the reference: ten roundings of sums of some 64 terms."""


@dataclass(frozen=True)
class OperatorCheck:
    """One operator in one dtype. Errors are shares of the largest value of the reference; NaN where a value is NaN.

    Attributes:
        operator: Its name below megalaunch.
        implementation: The override, or "megalaunch".
        dtype: "float32" or "bfloat16".
        forward: The error of the output.
        backward: The largest error of the gradients.
        limit: The largest error that is accepted.
        problem: What the operator raised; None: nothing.
    """

    operator: str
    implementation: str
    dtype: str
    forward: float
    backward: float
    limit: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether both errors are within the limit (NaN is not)."""
        return self.problem is None and self.forward <= self.limit and self.backward <= self.limit


@dataclass(frozen=True)
class _Case:
    """An operator, its reference, the shapes of its differentiable inputs, and what follows them."""

    operator: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]
    others: tuple[object, ...] = ()


_CASES = (
    _Case(rms_norm, rms_norm_reference, ((3, 5, 64), (64,)), (1e-5,)),
    _Case(swiglu, swiglu_reference, ((3, 5, 64), (3, 5, 64))),
    _Case(causal_sdpa, causal_sdpa_reference, ((2, 4, 33, 16), (2, 2, 33, 16), (2, 2, 33, 16)), (None,)),
    _Case(cross_entropy, cross_entropy_reference, ((12, 50),), (torch.arange(12) * 3, 6)),
    _Case(
        grouped_linear,
        grouped_linear_reference,
        ((12, 16), (3, 8, 16)),
        (torch.tensor([5, 5, 12], dtype=torch.int32),),
    ),
)


def check_operators(platform: Platform) -> Iterator[OperatorCheck]:
    """Check every operator on the first device of a platform, in fp32 and bf16.

    Raises:
        OverrideError: An override cannot be loaded.
    """
    device = platform.device(0)
    overrides = load_overrides(device.type)
    for case in _CASES:
        name = operator_name(case.operator)
        override = overrides.get(name)
        used = "megalaunch" if override is None else f"{override.__module__}:{override.__qualname__}"
        for dtype, limit in TOLERANCES.items():
            try:
                errors, problem = _errors(case, device, dtype), None
            except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
                errors, problem = (float("nan"), float("nan")), f"{type(error).__name__}: {error}"
            yield OperatorCheck(name, used, str(dtype).removeprefix("torch."), *errors, limit, problem)
    _finish_backward(device)


def _finish_backward(device: torch.device) -> None:
    """Run a backward pass without Python functions.

    Autograd's thread of the device has then dropped the Python objects of earlier passes: a thread that waits for
    Python's lock when the process ends aborts it.
    """
    x = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad((x * 2).sum(), [x])


def _errors(case: _Case, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of the output, and the largest of the gradients."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in case.shapes]
    expected, dy = _run(case.reference, [x.double() for x in inputs], case.others, None, draw)
    found, _ = _run(case.operator, [x.to(device) for x in inputs], _on(device, case.others), dy.to(dtype), draw)
    output, *gradients = (_error(x, reference) for x, reference in zip(found, expected, strict=True))
    return output, max(gradients, key=lambda error: (error != error, error))


def _run(
    operator: Callable[..., Tensor],
    inputs: list[Tensor],
    others: Sequence[object],
    dy: Tensor | None,
    draw: torch.Generator,
) -> tuple[list[Tensor], Tensor]:
    """Return the output and the gradients of the inputs, and the gradient of the output (None: drawn)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = operator(*(x * 1 for x in leaves), *others)  # some operators overwrite what they are given
    if dy is None:
        dy = torch.randn(y.shape, generator=draw).to(torch.bfloat16).to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, dy.to(y.device, y.dtype))
    return [y.detach(), *gradients], dy


def _on(device: torch.device, values: Sequence[object]) -> list[object]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"returns {tuple(found.shape)}, not {tuple(expected.shape)}")
    difference = (found.cpu().double() - expected).abs().max() / expected.abs().max()
    return float(difference)
