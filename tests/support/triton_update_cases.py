"""Fused updates of weights and moments against fp64, and against the rules that run operator by operator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton_comparison import randn

from megalaunch.engine.optimizer.update_rules import AdamW, Lion, ParameterState, Update
from megalaunch.kernels.forms import KernelForms, use_kernel_forms
from megalaunch.kernels.fused_update import triton_kernels
from megalaunch.schema.optimizer import OptimizerSpec

SPEC = OptimizerSpec(beta1=0.9, beta2=0.999)
RULES: dict[str, Callable[[OptimizerSpec], Any]] = {"adamw": AdamW, "lion": Lion}
SHAPES = ((), (0,), (1,), (3, 5), (2048,), (0, 4), (2049,), (2, 2500))
ALIGNED = ((16,), (2, 2048), (4112,))
"""Shapes whose elements are read 16 bytes at a time."""
DIGITS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""A result in a half format may be the next one: the arithmetic before is in fp32."""

State = dict[str, list[Tensor]]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _before_a_seven(values: Tensor) -> Tensor:
    """Return the values in memory in which a 7 follows them."""
    flat = values.new_full((values.numel() + 1,), 7.0)
    flat[:-1] = values.flatten()
    return flat[:-1].view(values.shape)


def _start(
    rule: Any, dtypes: tuple[torch.dtype, ...], device: str, is_strided: bool, shapes: tuple[tuple[int, ...], ...]
) -> State:
    """Weights, gradients and moments of the shapes; moments as after updates."""
    weight_dtype, gradient_dtype, moment_dtype = dtypes
    names = {"weight": weight_dtype, "gradient": gradient_dtype} | dict.fromkeys(rule.state_names, moment_dtype)
    made: State = {}
    for number, (name, dtype) in enumerate(names.items()):
        values = [randn(1, *size, seed=10 * number + place)[0] for place, size in enumerate(shapes)]
        values = [value.square() / 10 if name == "exp_avg_sq" else value for value in values]
        made[name] = [_before_a_seven(value.to(device, dtype)) for value in values]
        if is_strided:
            made[name] = [value.mT.contiguous().mT if value.ndim > 1 else value for value in made[name]]
    return made


def _update(rule: Any, state: State, count: int, by_kernels: bool, weight_decay: float) -> None:
    states = [
        ParameterState({name: state[name][place] for name in rule.state_names}, weight.new_full((), count, dtype=FP32))
        for place, weight in enumerate(state["weight"])
    ]
    update = Update(state["weight"], state["gradient"], states, 0.01, weight_decay, 3.0)
    with use_kernel_forms(KernelForms(update_kernels=triton_kernels() if by_kernels else None)):
        rule.apply(update)
    assert all(one.updates.item() == count + (rule.state_names[-1] == "exp_avg_sq") for one in states)


def _exact(rule: Any, state: State, count: int, weight_decay: float) -> State:
    """The update in fp64, by the formulas of the papers."""
    found = {name: [value.double().cpu() for value in values] for name, values in state.items()}
    for place, weight in enumerate(found["weight"]):
        gradient, average = found["gradient"][place] / 3, found["exp_avg"][place]
        weight.mul_(1 - 0.01 * weight_decay)
        if "exp_avg_sq" in found:
            square = found["exp_avg_sq"][place]
            average.mul_(SPEC.beta1).add_(gradient, alpha=1 - SPEC.beta1)
            square.mul_(SPEC.beta2).addcmul_(gradient, gradient, value=1 - SPEC.beta2)
            root = (square / (1 - SPEC.beta2 ** (count + 1))).sqrt()
            weight.sub_(0.01 / (1 - SPEC.beta1 ** (count + 1)) * average / (root + SPEC.epsilon))
        else:
            weight.sub_(0.01 * (SPEC.beta1 * average + (1 - SPEC.beta1) * gradient).sign())
            average.mul_(SPEC.beta2).add_(gradient, alpha=1 - SPEC.beta2)
    return found


def update_case(
    device: str,
    name: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    count: int = 0,
    weight_decay: float = 0.1,
    is_strided: bool = False,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
) -> None:
    """Many tensors at once, also empty ones and one of one element."""
    rule = RULES[name](SPEC)
    mine = _start(rule, dtypes, device, is_strided, shapes)
    exact = _exact(rule, mine, count, weight_decay)
    reference = _start(rule, dtypes, "cpu", False, shapes)  # which refuses strides
    _update(rule, reference, count, False, weight_decay)
    _update(rule, mine, count, True, weight_decay)
    for key in ("weight", *rule.state_names):
        for found, theirs, expected in zip(mine[key], reference[key], exact[key], strict=True):
            digits = DIGITS[found.dtype]
            for other in (theirs, expected):
                torch.testing.assert_close(found.double().cpu(), other.double(), rtol=digits, atol=digits / 10)
            # Rounded to the nearest, as the reference; but Triton's interpreter cuts off the digits of bf16.
            if found.dtype == FP16 or (found.dtype == BF16 and found.is_cuda):
                assert (found.cpu() != theirs).sum() <= found.numel() / 100, (key, found.shape)
    for before, after in zip(_start(rule, dtypes, device, is_strided, shapes)["weight"], mine["weight"], strict=True):
        assert before.stride() == after.stride()
        behind = torch.as_strided(after, (1,), (1,), after.numel()) if not is_strided else after.new_tensor(7.0)
        assert behind.item() == 7, "nothing behind a tensor is written"
        assert not after.numel() or not torch.equal(before, after)


UPDATE_CASES = {
    **{
        f"{name} of {weight}, {gradient}, {moment}": partial(update_case, name=name, dtypes=(weight, gradient, moment))
        for name in RULES
        for weight, gradient, moment in ((BF16, BF16, BF16), (FP32, FP32, BF16), (FP16, FP32, FP16), (BF16, BF16, FP32))
    },
    "adamw, aligned": partial(update_case, name="adamw", dtypes=(BF16, FP32, BF16), shapes=ALIGNED),
    "lion, aligned": partial(update_case, name="lion", dtypes=(FP32, FP32, FP16), shapes=ALIGNED),
    "lion of fp32": partial(update_case, name="lion", dtypes=(FP32, FP32, FP32)),
    "adamw after many updates": partial(update_case, name="adamw", dtypes=(BF16, BF16, FP32), count=1000),
    "adamw without decay": partial(update_case, name="adamw", dtypes=(FP32, FP32, BF16), weight_decay=0.0),
    "lion without decay": partial(update_case, name="lion", dtypes=(FP32, BF16, BF16), weight_decay=0.0),
    "adamw, not contiguous": partial(update_case, name="adamw", dtypes=(BF16, FP32, BF16), is_strided=True),
    "lion, not contiguous": partial(update_case, name="lion", dtypes=(FP32, FP32, FP32), is_strided=True),
}
