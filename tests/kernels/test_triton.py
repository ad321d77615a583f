"""The Triton kernels, forward and backward, against plain torch in fp64: on a GPU, or by Triton's interpreter."""

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from paths import TESTS
from triton_add_norm_cases import ADD_NORM_CASES
from triton_comparison import compare, randn
from triton_float8_cases import FLOAT8_CASES
from triton_geglu_cases import GEGLU_CASES
from triton_grouped_cases import GROUPED_CASES
from triton_loss_cases import LOSS_CASES
from triton_operator_cases import OPERATOR_CASES
from triton_rope_cases import ROPE_CASES
from triton_update_cases import UPDATE_CASES

from megalaunch.kernels.forms import KernelForms, use_kernel_forms
from megalaunch.kernels.permute import (
    REFERENCE,
    keep_rows,
    pad_rows,
    permute,
    sort_by_expert,
    triton_kernels,
    unpermute,
)
from megalaunch.kernels.swiglu import swiglu_fused, swiglu_reference


def swiglu_case(size: tuple[int, ...], device: str, dtype: torch.dtype, transposed: bool = False) -> None:
    """Output and both gradients."""
    inputs = [(value * 3).to(device, dtype) for value in (randn(*size), randn(*size, seed=1), randn(*size, seed=2))]
    results = []
    for implementation in (swiglu_fused, swiglu_reference):
        kept = inputs if implementation is swiglu_fused else [value.double() for value in inputs]
        *leaves, upstream = [value.mT if transposed else value for value in kept]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = implementation(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    compare(*results, dtype)


def permute_case(
    device: str,
    dtype: torch.dtype,
    *,
    tokens: int = 9,
    width: int = 70,
    choices: int = 2,
    weights_dtype: torch.dtype = torch.float32,
    form: str = "all",
    strided: bool = False,
) -> None:
    """Tokens to rows and back, with a factor on each row: output and the gradients of tokens and weights."""
    experts = 5
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(3)).argsort(1)[:, :choices]
    ids[ids == 3] = experts if form != "all" else 4  # no token for expert 3; dropped, where the form has drops
    permutation, counts = sort_by_expert(ids.to(device), experts)
    if form == "kept":
        permutation = keep_rows(permutation, int(counts.sum()))
    padding = None
    if form == "padded":
        permutation, padding = pad_rows(permutation, counts, tokens + 1)
    rows = permutation.pairs_R.shape[0] - (form != "all")
    x, upstream = randn(tokens, width).to(device, dtype), randn(tokens, width, seed=1).to(device, dtype)
    weights = randn(tokens, choices, seed=2).to(device, weights_dtype)
    factors = torch.linspace(0.5, 1.5, max(rows, 1), device=device)[:rows, None]
    if strided:
        x, upstream, weights = (value.T.contiguous().T for value in (x, upstream, weights))

    def both_ways(x_TH: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        y = permute(x_TH, permutation)[:rows] * factors.to(x_TH.dtype)
        y = y if padding is None else y.masked_fill(padding[:, None], 0)
        return unpermute(y if form == "all" else torch.nn.functional.pad(y, (0, 0, 0, 1)), permutation, weights_Tk)

    results = []
    for kernels in (triton_kernels(), REFERENCE):
        wide = torch.Tensor.double if kernels is REFERENCE else torch.Tensor.detach
        leaves = [wide(value).clone(memory_format=torch.preserve_format).requires_grad_() for value in (x, weights)]
        with use_kernel_forms(KernelForms(row_kernels=kernels)):
            out = both_ways(*leaves)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, wide(upstream))])
    compare(*results, dtype)


CASES = {
    **ADD_NORM_CASES,
    **ROPE_CASES,
    **GEGLU_CASES,
    **FLOAT8_CASES,
    **GROUPED_CASES,
    **LOSS_CASES,
    **UPDATE_CASES,
    **OPERATOR_CASES,
    **{
        f"swiglu {size} {dtype}": partial(swiglu_case, size, dtype=dtype)
        for size in [(7,), (3, 5, 50), (1024,), (2, 1025)]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "swiglu, not contiguous": partial(swiglu_case, (5, 9), dtype=torch.float32, transposed=True),
    "rows": partial(permute_case, dtype=torch.float32),
    "rows in bf16": partial(permute_case, dtype=torch.bfloat16),
    "rows in fp64": partial(permute_case, dtype=torch.float64, weights_dtype=torch.float64),
    "rows in fp32, weights in fp64": partial(permute_case, dtype=torch.float32, weights_dtype=torch.float64),
    "rows, not contiguous": partial(permute_case, dtype=torch.float32, strided=True),
    "rows, one expert a token": partial(permute_case, dtype=torch.float32, choices=1, width=1),
    "rows of two blocks": partial(permute_case, dtype=torch.bfloat16, tokens=3, width=1030),
    "rows of one block": partial(permute_case, dtype=torch.float32, tokens=2, width=1024, choices=4),
    "no tokens": partial(permute_case, dtype=torch.float32, tokens=0),
    "rows without the dropped": partial(permute_case, dtype=torch.float32, form="kept"),
    "padded rows": partial(permute_case, dtype=torch.float32, form="padded"),
    "padded rows in bf16": partial(permute_case, dtype=torch.bfloat16, form="padded"),
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    # Read when Triton is imported, hence a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS / "support")}
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.splitlines() == list(CASES), run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_kernels_on_cuda(case):
    CASES[case](device="cuda")


if __name__ == "__main__":
    for name, case in CASES.items():
        case(device="cpu")
        print(name)
