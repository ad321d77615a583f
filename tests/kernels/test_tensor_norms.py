"""Norms of pieces: both forms give the norm of all tensors together."""

import pytest
import torch

from megalaunch.kernels.tensor_norms import piece_norms_cpu, piece_norms_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_add_up_to_the_norm_of_all_tensors(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(size).to(dtype) for size in [(3,), (256,), (7, 100), (2, 256)]]
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    for form in (piece_norms_cpu, piece_norms_reference):
        norms = form(tensors)
        assert norms.dtype == torch.float32
        torch.testing.assert_close(norms.double().norm(), expected, rtol=1e-6, atol=0)
