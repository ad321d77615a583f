"""RMSNorm on a CPU against torch's operator."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_and_its_gradients_are_those_of_torch(dtype):
    torch.manual_seed(0)
    x, weight, dy = torch.randn(2, 50, 96) * 3, torch.rand(96), torch.randn(2, 50, 96)
    mine = [t.to(dtype).requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in mine]
    found, expected = rms_norm(*mine, 1e-5), F.rms_norm(exact[0], (96,), exact[1], 1e-5)
    found.backward(dy.to(dtype))
    expected.backward(dy.to(dtype).double())
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
    for one, other in [(found, expected), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]:
        assert one.dtype == dtype
        assert (one - other).abs().max() <= tolerance * other.abs().max()


def test_one_row_in_generation_equals_torch():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 1, 96) * 3, torch.rand(96)
    with torch.inference_mode():
        found = rms_norm(x, weight, 1e-5)
    assert found.shape == x.shape
    torch.testing.assert_close(found, F.rms_norm(x, (96,), weight, 1e-5), rtol=2e-6, atol=1e-6)
