"""x W^T of a few rows: every form against torch's."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels.small_batch_linear import SmallBatchLinear


@pytest.mark.parametrize("rows", [1, 2, 8, 24, 25])
@pytest.mark.parametrize("features", [40, 288, 201])
@pytest.mark.parametrize("biased", [False, True])
def test_output_equals_torch_for_any_number_of_rows(rows, features, biased):
    """One row, few rows by blocks (with features left over and without), and many."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(features, 32), torch.randn(features) if biased else None
    x, residual = torch.randn(rows, 32), torch.randn(rows, features)
    linear, expected = SmallBatchLinear(weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.add_to(residual, x), residual + expected, rtol=1e-5, atol=1e-5)
