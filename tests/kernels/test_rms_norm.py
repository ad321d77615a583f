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
