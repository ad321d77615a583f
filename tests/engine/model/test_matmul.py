"""Products that are computed in fp32 where the processor is slow in bf16: the numbers of torch's own."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.engine.model import matmul as products
from megalaunch.engine.model.matmul import linear, matmul, use_fp32_matmul
from megalaunch.engine.model.norm import rms_norm
from megalaunch.engine.model.rope import RopeCache, apply_rope

NARROW = torch.bfloat16


@pytest.fixture(autouse=True)
def no_unit(monkeypatch):
    """This test's processor multiplies bf16 slowly, whatever it is."""
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


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
def test_rms_norm_and_its_gradients_are_those_of_torch(dtype):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(2, 50, 96) * 3, torch.rand(96), torch.randn(2, 50, 96)
    mine = [t.to(dtype).requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in mine]
    found, expected = rms_norm(*mine, 1e-5), F.rms_norm(exact[0], (96,), exact[1], 1e-5)
    found.backward(dy.to(dtype))
    expected.backward(dy.to(dtype).double())
    tolerance = {torch.float32: 2e-6, NARROW: 8e-3}[dtype]
    for one, other in [(found, expected), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]:
        assert one.dtype == dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_a_rotation_is_undone_by_its_backward_pass():
    angles = torch.rand(10, 4).repeat(1, 2)
    rotation = RopeCache(angles.cos(), angles.sin())
    x = torch.randn(1, 3, 10, 12, requires_grad=True)  # 8 numbers of each head turn, 4 do not
    turned = apply_rope(x, rotation)
    turned.backward(turned.detach())
    torch.testing.assert_close(x.grad, x.detach())
    assert (turned - x).detach()[..., 1:, :8].abs().max() > 0.1
