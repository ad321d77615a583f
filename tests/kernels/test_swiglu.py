"""SwiGLU: each form against the plain-torch reference; the Triton kernels on a CPU through Triton's interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megalaunch.kernels.swiglu import swiglu, swiglu_fused, swiglu_reference

SIZES = [(7,), (3, 5, 50), (1024,), (2, 1025)]


def compare(device: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Output and both gradients of kernel and reference; half formats may differ by their last bit."""
    torch.manual_seed(0)
    upstream = torch.randn(size, device=device, dtype=dtype)
    results = []
    for implementation in (swiglu_fused, swiglu_reference):
        gate, up = ((torch.linspace(-6, 6, upstream.numel()) * k).view(size) for k in (1.0, -0.5))
        gate, up = (x.to(device, dtype).requires_grad_() for x in (gate, up))
        out = implementation(gate, up)
        out.backward(upstream)
        results.append((out.detach(), gate.grad, up.grad))
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for mine, reference in zip(*results, strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("overwrite_up", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_in_place_form_equals_the_reference(dtype, overwrite_up):
    torch.manual_seed(0)
    gate, up, upstream = (torch.randn(5, 70).to(dtype) for _ in range(3))
    leaves = gate.requires_grad_(), up.requires_grad_()
    before = [x.detach().clone() for x in leaves]
    expected = swiglu_reference(gate, up)
    of_the_reference = torch.autograd.grad(expected, leaves, upstream)
    found = swiglu(gate, up, overwrite_up=overwrite_up)
    assert torch.equal(found, expected)
    assert found.grad_fn.name() != expected.grad_fn.name()
    of_mine = torch.autograd.grad(found, leaves, upstream)
    assert all(torch.equal(mine, other) for mine, other in zip(of_mine, of_the_reference, strict=True))
    kept = [torch.equal(x, y) for x, y in zip(leaves, before, strict=True)]
    assert kept == [True, not (overwrite_up and dtype == torch.float32)], "others may read its inputs again"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is part of the CUDA wheels of torch only")
def test_kernel_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported, hence a process of its own
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "compared", run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_cuda(dtype, size):
    compare("cuda", dtype, size)


if __name__ == "__main__":
    for each in (torch.float32, torch.bfloat16, torch.float16):
        for shape in SIZES:
            compare("cpu", each, shape)
    print("compared")
