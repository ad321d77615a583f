"""Cases of the kernels of norms (kernels/add_norm_triton.py) for tests/kernels/test_triton.py."""

from functools import partial

import torch
from triton_comparison import compare, randn

from megalaunch.kernels.add_norm import add_norm_fused, add_norm_reference
from megalaunch.kernels.forms import KernelForms, use_kernel_forms
from megalaunch.kernels.fused_norm import norm_fused
from megalaunch.kernels.layer_norm import layer_norm_reference
from megalaunch.kernels.rms_norm import rms_norm_reference


def add_norm_case(
    size: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    layer: bool = False,
    weight_dtype: torch.dtype | None = None,
    update_dtype: torch.dtype | None = None,
    strided: str = "",
    outputs: tuple[int, ...] = (0, 1),
) -> None:
    """Sum and norm, and the gradients of all inputs from those of the outputs that are used."""
    dtypes = dtype, update_dtype or dtype, *(weight_dtype or dtype,) * (1 + layer)
    sizes = size, size, *((size[-1],),) * (1 + layer)
    inputs = [randn(*each, seed=i).to(device, its) for i, (each, its) in enumerate(zip(sizes, dtypes, strict=True))]
    normed_dtype = update_dtype or dtype
    upstream = [randn(*size, seed=9 + i).to(device, its) for i, its in enumerate((dtype, normed_dtype))]
    if strided:
        apart = partial(_strided, adjacent=strided == "rows")
        inputs[:2], upstream = [apart(value) for value in inputs[:2]], [apart(value) for value in upstream]
    results = []
    for exact in (False, True):
        wide = torch.Tensor.double if exact else torch.Tensor.detach
        leaves = [wide(value).detach().requires_grad_() for value in inputs]
        scale = (*leaves[2:], None)[:2]
        if exact:  # h is rounded to its dtype before the norm
            total = leaves[0] + leaves[1]
            rounding = (total.to(dtype) - total).detach()
            with use_kernel_forms(KernelForms(rms_norm=rms_norm_reference)):
                made = add_norm_reference(leaves[0], leaves[1] + rounding, *scale, 1e-5, torch.float64)
        else:
            made = add_norm_fused(*leaves[:2], *scale, 1e-5, normed_dtype)
            assert [one.dtype for one in made] == [dtype, normed_dtype]
        used, theirs = [made[i] for i in outputs], [wide(upstream[i]) for i in outputs]
        gradients = torch.autograd.grad(used, leaves, theirs, allow_unused=True)
        if not exact:
            assert [each.dtype for each in gradients if each is not None] == [
                each.dtype for each, found in zip(leaves, gradients, strict=True) if found is not None
            ]
        results.append([one.detach() for one in made] + [each for each in gradients if each is not None])
    compare(*results, update_dtype or dtype)


def norm_case(
    size: tuple[int, ...],
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    layer: bool = False,
    weight_dtype: torch.dtype | None = None,
    strided: str = "",
) -> None:
    """The norm without an addition, and the gradients of all inputs."""
    sizes = size, *((size[-1],),) * (1 + layer)
    inputs = [
        3 * randn(*each, seed=i).to(device, weight_dtype if i and weight_dtype else dtype)
        for i, each in enumerate(sizes)
    ]
    upstream = randn(*size, seed=9).to(device, dtype)
    if strided:
        inputs[0], upstream = (_strided(value, adjacent=strided == "rows") for value in (inputs[0], upstream))
    results = []
    for exact in (False, True):
        wide = torch.Tensor.double if exact else torch.Tensor.detach
        leaves = [wide(value).detach().requires_grad_() for value in inputs]
        x, weight, bias = (*leaves, None)[:3]
        if not exact:
            made = norm_fused(x, weight, bias, 1e-5)
        elif bias is None:
            made = rms_norm_reference(x, weight, 1e-5)
        else:
            made = layer_norm_reference(x, weight, bias, 1e-5)
        gradients = torch.autograd.grad(made, leaves, wide(upstream))
        results.append([made.detach(), *gradients])
        if not exact:
            assert made.dtype == dtype
            assert [each.dtype for each in gradients] == [each.dtype for each in inputs]
    compare(*results, dtype)


def _strided(value: torch.Tensor, *, adjacent: bool) -> torch.Tensor:
    """Return the values as a part of a larger tensor: of each row, or every second number."""
    if adjacent:
        return torch.nn.functional.pad(value, (0, 3))[..., :-3]
    return torch.stack((value, value), dim=-1)[..., 0]


def add_norm_derivatives(device: str) -> None:
    """Against differences of the values."""
    leaves = [randn(*each, seed=i).to(device).requires_grad_() for i, each in enumerate(((3, 5), (3, 5), (5,), (5,)))]
    for count in (3, 4):
        scale = (*leaves[2:count], None)[:2]
        function = partial(lambda scale, x, update, *_: add_norm_fused(x, update, *scale, 0.1, torch.float64), scale)
        assert torch.autograd.gradcheck(function, leaves[:count])


ADD_NORM_CASES = {
    **{
        f"add and {'LayerNorm' if layer else 'RMSNorm'} {size} {dtype}": partial(
            add_norm_case, size, dtype=dtype, layer=layer
        )
        for size, dtype in [
            ((1, 1), torch.float32),
            ((1, 64), torch.float32),
            ((3, 5, 50), torch.float32),
            ((9, 130), torch.bfloat16),
            ((2, 5, 64), torch.float16),
            ((3, 2, 7), torch.float64),
            ((0, 8), torch.float32),
        ]
        for layer in (False, True)
    },
    **{
        f"{'LayerNorm' if layer else 'RMSNorm'} {size} {dtype}": partial(norm_case, size, dtype=dtype, layer=layer)
        for size, dtype in [
            ((1, 1), torch.float32),
            ((3, 5, 50), torch.float32),
            ((9, 130), torch.bfloat16),
            ((2, 5, 64), torch.float16),
            ((3, 2, 7), torch.float64),
            ((0, 8), torch.float32),
        ]
        for layer in (False, True)
    },
    "norm, widest": partial(norm_case, (2, 16384), dtype=torch.bfloat16),
    "norm, not contiguous": partial(norm_case, (4, 3, 20), strided="rows", layer=True),
    "norm, not contiguous, in bf16": partial(norm_case, (4, 3, 20), dtype=torch.bfloat16, strided="features"),
    "norm, weight in fp32": partial(norm_case, (4, 30), dtype=torch.bfloat16, weight_dtype=torch.float32, layer=True),
    "add and norm, widest": partial(add_norm_case, (2, 16384), dtype=torch.bfloat16, layer=True),
    "add and norm, not contiguous": partial(add_norm_case, (4, 3, 20), strided="rows"),
    "add and norm, not contiguous, in bf16": partial(
        add_norm_case, (4, 3, 20), dtype=torch.bfloat16, strided="features", layer=True
    ),
    "add and norm, residual stream in fp32": partial(
        add_norm_case, (4, 30), update_dtype=torch.bfloat16, weight_dtype=torch.bfloat16
    ),
    "add and norm, weight in fp32": partial(
        add_norm_case, (4, 30), dtype=torch.bfloat16, weight_dtype=torch.float32, layer=True
    ),
    "add and norm, only the sum is used": partial(add_norm_case, (4, 30), outputs=(0,)),
    "add and norm, only the norm is used": partial(add_norm_case, (4, 30), outputs=(1,), layer=True),
    "add and norm, derivatives": add_norm_derivatives,
}
