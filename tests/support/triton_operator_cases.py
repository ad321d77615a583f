"""Cases of torch's operators that the Triton kernels are, for tests/kernels/test_triton.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton_comparison import randn

import megalaunch.kernels.float8_operators
import megalaunch.kernels.operators  # noqa: F401  # registers them
from megalaunch.kernels.add_norm import add_norm_fused
from megalaunch.kernels.float8_cast import E4M3, E5M2
from megalaunch.kernels.geglu import geglu_fused
from megalaunch.kernels.permute import Permutation, sort_by_expert
from megalaunch.kernels.rope import rope_fused
from megalaunch.kernels.swiglu import swiglu_fused


class Inputs:
    """Leaves that need gradients, on one device; the dims of every second one lie in memory in another order."""

    def __init__(self, device: str) -> None:
        self.device, self._made = device, 0

    def leaf(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._made += 1
        made = randn(*size, seed=self._made).to(self.device, dtype)
        made = made.transpose(0, -1).contiguous().transpose(0, -1) if self._made % 2 else made
        return made.detach().requires_grad_()

    def plain(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.leaf(*size, dtype=dtype).detach()

    def rows(self, *size: int) -> Tensor:
        return self.plain(*size).contiguous()

    def columns(self) -> Tensor:
        return torch.tensor([4, -1, 37], device=self.device)

    def order(self) -> Permutation:
        return sort_by_expert(torch.tensor([[0, 2], [1, 0], [2, 1]], device=self.device), 3)[0]


def _norm_backward(at: Inputs, layer: bool) -> tuple[Any, ...]:
    d_total, rows = None if layer else at.plain(2, 3, 5), at.plain(6)
    return d_total, at.plain(2, 3, 5), at.plain(2, 3, 5), at.plain(5), rows if layer else rows[:0], rows, layer


def _float8(at: Inputs, *size: int, dtype: torch.dtype = E4M3) -> Tensor:
    return at.rows(*size).to(dtype)


def _offsets(at: Inputs, *ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=at.device)


def _weigh_rows(at: Inputs) -> tuple[Any, ...]:
    order = at.order()
    return at.plain(3, 5), at.plain(6, 5), order.pairs_R, order.rows_Tk, at.plain(3, 2)


ARGUMENTS: dict[str, list[Callable[[Inputs], tuple[Any, ...]]]] = {
    "swiglu": [lambda at: (at.leaf(3, 5), at.leaf(3, 5))],
    "swiglu_backward": [lambda at: (at.plain(3, 5), at.plain(3, 5), at.plain(3, 5))],
    "geglu": [lambda at: (at.leaf(3, 5), at.leaf(3, 5), "geglu_tanh")],
    "geglu_backward": [lambda at: (at.plain(3, 5), at.plain(3, 5), at.plain(3, 5), "quick_geglu")],
    "rope": [
        lambda at: ([at.leaf(2, 3, 4, 8), at.leaf(2, 1, 4, 8)], at.plain(4, 6), at.plain(4, 6), 1),
        lambda at: ([at.leaf(2, 3, 4, 8, dtype=torch.bfloat16)], at.plain(2, 1, 4, 8), at.plain(2, 1, 4, 8), -1),
    ],
    "add_norm": [
        lambda at: (at.leaf(2, 3, 5), at.leaf(2, 3, 5), at.leaf(5), None, 1e-5, torch.float32),
        lambda at: (at.leaf(2, 3, 5), at.leaf(2, 3, 5), at.leaf(5), at.leaf(5), 1e-5, torch.bfloat16),
    ],
    "norm": [
        lambda at: (at.leaf(2, 3, 5), at.leaf(5), None, 1e-5),
        lambda at: (at.leaf(2, 3, 5, dtype=torch.bfloat16), at.leaf(5), at.leaf(5), 1e-5),
    ],
    "norm_backward": [partial(_norm_backward, layer=layer) for layer in (False, True)],
    "gather_rows": [lambda at: (at.plain(3, 5), at.order().pairs_R, at.order().rows_Tk)],
    "sum_rows": [
        lambda at: (at.plain(6, 5), at.order().rows_Tk, None),
        lambda at: (at.plain(6, 5), at.order().rows_Tk, at.plain(3, 2)),
    ],
    "weigh_rows": [_weigh_rows],
    "float8_amax": [lambda at: (at.plain(6, 40), [1, 32])],
    "float8_cast": [lambda at: (at.plain(6, 40), at.plain(6, 2), [1, 32], E4M3)],
    "float8_cast_blocks": [lambda at: (at.plain(6, 40), [1, 32], True, E4M3)],
    "float8_cast_blocks_both": [lambda at: (at.plain(6, 40), 32, True, E4M3)],
    "float8_cast_with_amax": [
        lambda at: (at.plain(6, 40), at.plain(1, 1), E4M3, True),
        lambda at: (at.plain(6, 40), at.plain(1, 1), E4M3, False),
    ],
    "float8_rows_times_matrices": [
        lambda at: (
            *(_float8(at, 6, 64), at.rows(6, 2).abs(), _float8(at, 32, 64), at.rows(32, 2).abs()),
            *(_offsets(at, 2, 6), 1, 32, torch.bfloat16, False),  # rows behind the last offset are undefined
        ),
    ],
    "float8_columns_times_rows": [
        lambda at: (
            *(_float8(at, 16, 64, dtype=E5M2), at.plain(16, 2).abs(), _float8(at, 48, 64), at.plain(48, 2).abs()),
            *(_offsets(at, 16, 64), 0, torch.bfloat16),
        ),
    ],
    "loss_sums": [lambda at: (at.rows(3, 40), at.columns(), 38, None)],
    "write_loss_gradient": [
        lambda at: (at.rows(3, 40), at.columns(), at.plain(3), at.plain(3), 38, None),
    ],
    "loss_and_gradient": [lambda at: (at.rows(3, 40), at.columns(), 38, 2.0)],
    "adamw": [
        lambda at: (
            *([at.rows(3, 5), at.rows(7).bfloat16()] for _ in range(3)),
            *([at.rows(3, 5).abs(), at.rows(7).abs()], [torch.ones((), device=at.device) for _ in range(2)]),
            *(1e-3, 0.9, 0.95, 1e-8, 0.1, 2.0),
        ),
    ],
    "lion": [lambda at: (*([at.rows(3, 5), at.rows(7).bfloat16()] for _ in range(3)), 1e-3, 0.9, 0.95, 0.1, 2.0)],
    "float8_cast_both": [lambda at: (at.plain(6, 40), at.plain(1, 1), E4M3)],
}
"""Arguments of each operator, by its name."""


def operator_case(device: str, name: str, number: int) -> None:
    """Schema, rule for shapes and strides, rule for autograd, and a graph of it with symbolic shapes."""
    arguments = ARGUMENTS[name][number](Inputs(device))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if any(isinstance(one, Tensor) and one.dtype in (E4M3, E5M2) for one in arguments):
        checks = checks[1:]  # it compares inputs before and after a call, and torch cannot compare fp8
    torch.library.opcheck(getattr(torch.ops.megalaunch, name).default, arguments, test_utils=checks)


def every_operator_case(device: str) -> None:
    """No operator is without a case; that of experts in fp8 calls torch's on a GPU (test_float8_grouped.py)."""
    namespace = "megalaunch::"
    found = {each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith(namespace)}
    assert found - {f"{namespace}scaled_grouped_mm"} == {f"{namespace}{name}" for name in ARGUMENTS}


def one_graph_case(device: str) -> None:
    """torch.compile keeps them in one graph, with the numbers of the kernels themselves."""
    at = Inputs(device)
    leaves, angles = [at.leaf(2, 4, 3, 8), at.leaf(2, 4, 3, 8), at.leaf(8), at.leaf(8)], at.plain(3, 8)

    def block(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        total, normed = add_norm_fused(x, update, weight, bias, 1e-5, torch.float32)
        total, normed = rope_fused((total, normed), angles.cos(), angles.sin())
        return geglu_fused(swiglu_fused(total, normed), total)

    results = []
    for form in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        made = form(*leaves)
        results.append([made, *torch.autograd.grad(made.square().sum(), leaves)])
    assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))


OPERATOR_CASES = {
    **{
        f"operator {name}, {number}": partial(operator_case, name=name, number=number)
        for name, arguments in ARGUMENTS.items()
        for number in range(len(arguments))
    },
    "every operator has a case": every_operator_case,
    "operators in one graph": one_graph_case,
}
