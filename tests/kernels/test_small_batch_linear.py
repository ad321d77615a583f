"""x W^T of a few rows: every form against torch's."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels.small_batch_linear import SmallBatchLinear


@pytest.mark.parametrize("rows", [1, 2, 3, 24])
@pytest.mark.parametrize("features", [40, 288, 201])
@pytest.mark.parametrize("biased", [False, True])
def test_output_equals_torch_for_any_number_of_rows(rows, features, biased):
    """One and two as columns by blocks of features (some left over, all, none), more by the packed weight."""
    torch.manual_seed(rows)
    weight, bias = torch.randn(features, 32), torch.randn(features) if biased else None
    x = torch.randn(rows, 32)
    torch.testing.assert_close(SmallBatchLinear(weight, bias)(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "may_pack"), [(torch.float32, False), (torch.float64, True), (torch.bfloat16, True)])
def test_weights_that_are_not_packed(dtype, may_pack):
    torch.manual_seed(1)
    weight, bias, x = (torch.randn(*shape, dtype=dtype) for shape in ((288, 32), (288,), (8, 32)))
    assert torch.equal(SmallBatchLinear(weight, bias, may_pack)(x), F.linear(x, weight, bias))
