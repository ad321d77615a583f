"""Compare the operators of a platform, forward and backward, with plain torch in fp64 on a CPU.

Vendors' kernels may compute wrong values without an error. Inputs are small and the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megalaunch.engine.operator_cases import CASES, PLAIN_TORCH, Case
from megalaunch.engine.platform.platform import Platform
from megalaunch.kernels.forms import use_kernel_forms
from megalaunch.kernels.overridable import build_for, only_override
from megalaunch.platform.overrides import active_overrides

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType({torch.float32: 1e-5, torch.bfloat16: 0.02})
"""The largest deviation, as a share of the largest value of the reference: ten roundings of sums of some 64 terms."""


@dataclass(frozen=True)
class OperatorCheck:
    """One operator in one dtype. Errors are shares of the largest value of the reference; NaN where a value is NaN.

    Attributes:
        operator: Its name below megalaunch, and in brackets the settings that differ from the usual ones.
        implementation: The override, or "megalaunch".
        dtype: "float32" or "bfloat16".
        forward: The error of the output.
        backward: The largest error of the gradients; None: it has none.
        limit: The largest error that is accepted.
        problem: What the operator raised; None: nothing.
    """

    operator: str
    implementation: str
    dtype: str
    forward: float
    backward: float | None
    limit: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """Whether both errors are within the limit (NaN is not)."""
        return self.problem is None and self.forward <= self.limit and (self.backward or 0.0) <= self.limit


def check_operators(platform: Platform) -> Iterator[OperatorCheck]:
    """Check everything that can be overridden on the first device of a platform, in fp32 and bf16.

    While one override is checked, no other is used: each has its own verdict.

    Raises:
        OverrideError: An override cannot be loaded.
    """
    device = platform.device(0)
    active = active_overrides(device.type)
    for case in CASES:
        row = active.get(case.name)
        if row is None and not case.always:
            continue
        # On this thread: autograd's thread of a device may still drop Python objects when the process ends, and waiting
        # for an interpreter that is gone aborts it.
        with only_override(device.type, case.name), torch.autograd.set_multithreading_enabled(False):
            for dtype, limit in TOLERANCES.items():
                errors: tuple[float, float | None]
                try:
                    errors, problem = _errors(case, device, dtype), None
                except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
                    errors, problem = (float("nan"), float("nan")), f"{type(error).__name__}: {error}"
                used = "megalaunch" if row is None else str(row)
                yield OperatorCheck(case.label, used, str(dtype).removeprefix("torch."), *errors, limit, problem)


@dataclass(frozen=True)
class _Inputs:
    """The values of one case: parameters of the module by name, inputs, others, gradients of the outputs."""

    parameters: Mapping[str, Tensor]
    differentiable: Sequence[Tensor]
    others: Sequence[object]

    def to(self, device: torch.device, dtype: torch.dtype) -> _Inputs:
        """Return the values on a device, those that are floating in a dtype."""

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, dtype) if value.is_floating_point() else value.to(device)

        moved = {name: move(value) for name, value in self.parameters.items()}
        return _Inputs(moved, [move(x) for x in self.differentiable], [move(x) for x in self.others])


def _errors(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[float, float | None]:
    """Return the largest error of the outputs, and of the gradients of inputs and parameters."""
    cpu, draw = torch.device("cpu"), torch.Generator().manual_seed(1)
    module = None if case.module is None else case.module(torch.float64)
    shapes = {} if module is None else {name: tuple(x.shape) for name, x in module.named_parameters()}
    drawn = {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    inputs = _Inputs(drawn, [torch.randn(shape, generator=draw) for shape in case.shapes], case.others).to(cpu, dtype)
    with use_kernel_forms(PLAIN_TORCH):
        expected, leaves = _call(case.reference, module, inputs.to(cpu, torch.float64))
    dys = [torch.randn(y.shape, generator=draw).to(dtype) if y.is_floating_point() else None for y in expected]
    wanted = _gradients(case, expected, leaves, dys)
    found, leaves = _call(case.call, _build(case, shapes, device, dtype), inputs.to(device, dtype))
    gradients = _gradients(case, found, leaves, dys)
    return _worst(found, expected), _worst(gradients, wanted) if case.differentiable else None


def _build(case: Case, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Any:
    """Build the module of a case as training does: on meta, for a device, on which it then is.

    Raises:
        ValueError: Its parameters are not those of the original, so that no checkpoint would fit.
    """
    if case.module is None:
        return None
    with torch.device("meta"), build_for(device):
        module = case.module(dtype)
    found = {name: tuple(x.shape) for name, x in module.named_parameters()}
    if found != shapes:
        raise ValueError(f"has the parameters {found}, not {shapes}: checkpoints would not fit")
    return module.to_empty(device=device).to(dtype)


def _call(function: Callable[..., Any], module: Any, inputs: _Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the leaves with respect to which gradients are compared: inputs, then parameters."""
    leaves = [x.detach().requires_grad_() for x in inputs.differentiable]
    for name, value in inputs.parameters.items():
        owner, _, attribute = name.rpartition(".")
        parameter = torch.nn.Parameter(value.detach().clone())
        setattr(module.get_submodule(owner), attribute, parameter)
        leaves.append(parameter)
    # Some operators overwrite what they are given, so that they get copies.
    outputs = function(module, *(x * 1 for x in leaves[: len(inputs.differentiable)]), *inputs.others)
    return list(outputs) if isinstance(outputs, tuple) else [outputs], leaves


def _gradients(
    case: Case, outputs: Sequence[Tensor], leaves: Sequence[Tensor], dys: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradients of the leaves for those of the outputs; zeros for a leaf that no output depends on.

    A method need not use all parameters of its module.
    """
    if not case.differentiable:
        return []
    pairs = [(y, dy.to(y.device, y.dtype)) for y, dy in zip(outputs, dys, strict=True) if dy is not None]
    ys, their_dys = [y for y, _ in pairs], [dy for _, dy in pairs]
    return list(torch.autograd.grad(ys, leaves, their_dys, allow_unused=True, materialize_grads=True))


def _worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest error; NaN is larger than any other."""
    if len(found) != len(expected):
        raise ValueError(f"returns {len(found)} tensors, not {len(expected)}")
    errors = [_error(x, reference) for x, reference in zip(found, expected, strict=True)]
    return max(errors, key=lambda error: (error != error, error))


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"returns {tuple(found.shape)}, not {tuple(expected.shape)}")
    found = found.detach().cpu()
    if not expected.is_floating_point():
        return float((found != expected).any())
    largest = float(expected.detach().abs().max())
    return float((found.double() - expected.detach()).abs().max()) / (largest or 1.0)
