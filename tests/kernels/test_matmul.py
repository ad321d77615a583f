"""Matmuls in fp32 of bf16 operands, where the CPU is slow in bf16: they round once."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels import matmul as products
from megalaunch.kernels.matmul import linear, matmul, use_fp32_matmul

NARROW = torch.bfloat16


@pytest.fixture(autouse=True)
def no_unit(monkeypatch):
    """Test as on a CPU without bf16 instructions."""
    monkeypatch.setattr(products, "_unit", lambda: None)


def test_what_is_widened(monkeypatch):
    many, few = torch.randn(2, 64, 8), torch.randn(2, 8)
    assert use_fp32_matmul(many.to(NARROW))
    assert not use_fp32_matmul(few.to(NARROW)), "a row of generated text"
    assert not use_fp32_matmul(many)
    monkeypatch.setattr(products, "_unit", lambda: "AMX")
    assert not use_fp32_matmul(many.to(NARROW))


def test_outputs_and_gradients_are_rounded_once():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 64, 96), torch.randn(80, 96), torch.randn(80)
    dy = torch.randn(2, 64, 80).to(NARROW)
    mine = [t.to(NARROW).requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().double().requires_grad_() for t in mine]
    found, expected = linear(*mine), F.linear(*exact[:2])
    assert found.dtype == NARROW
    found.backward(dy)
    expected.backward(dy.double())
    bit = 2**-8  # half of the last bit, of the rounded product and again of the sum with the bias
    assert (found - expected.to(NARROW) - mine[2]).abs().max() <= 3 * bit * expected.abs().max()
    for one, other in zip(mine[:2], exact[:2], strict=True):
        assert one.grad.dtype == NARROW
        assert ((one.grad - other.grad).abs() <= 1.01 * bit * other.grad.abs() + 1e-5).all()


def test_a_product_is_added_before_it_is_rounded():
    a, b, onto = torch.randn(2, 64, 16).to(NARROW), torch.randn(16, 24).to(NARROW), torch.randn(2, 64, 24).to(NARROW)
    exact = a.double() @ b.double() + onto.double()
    assert ((matmul(a, b, onto) - exact).abs() <= 1.01 * 2**-8 * exact.abs() + 1e-5).all()
    torch.testing.assert_close(matmul(a.float(), b.float(), onto.float()).double(), exact, rtol=1e-5, atol=1e-5)
