"""SwiGLU: the in-place form against the plain-torch reference; test_triton.py has the Triton kernels."""

import pytest
import torch

from megalaunch.kernels.swiglu import swiglu, swiglu_reference


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
