"""The grouped linear layer against one matmul per expert: aligned and unaligned shapes, empty experts, tail rows."""

from itertools import pairwise

import pytest
import torch

from megalaunch.kernels.grouped_linear import experts_of_rows, grouped_linear, grouped_linear_reference


def reference(x, weight, offsets, bias):
    ends = [0, *offsets.tolist()]
    return torch.cat([x[a:b] @ weight[e].T + bias[e] for e, (a, b) in enumerate(pairwise(ends))])


def run(function, dtype, sizes, offsets, rows):
    features, hidden = sizes
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(rows, hidden, generator=generator), torch.randn(4, features, hidden, generator=generator)]
    leaves.append(torch.randn(4, features, generator=generator))
    x, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
    kept = int(offsets[-1])
    out = function(x, weight, offsets, bias)[:kept]
    (out.float().square().sum() / 2).backward()
    return out, x.grad[:kept], weight.grad, bias.grad


@pytest.mark.parametrize("sizes", [(12, 8), (8, 16), (6, 10)], ids=["aligned fp32", "aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offsets", [[3, 3, 9, 11], [0, 0, 0, 11], [11, 11, 11, 11]], ids=str)
def test_one_matmul_per_expert(sizes, dtype, offsets):
    offsets = torch.tensor(offsets, dtype=torch.int32)
    found, expected = (run(function, dtype, sizes, offsets, 11) for function in (grouped_linear, reference))
    tolerance = {"rtol": 5e-2, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("features", [8, 6], ids=["aligned", "unaligned"])
def test_rows_past_the_last_offset_are_not_read(features):
    offsets = torch.tensor([3, 3, 9, 11], dtype=torch.int32)
    rows, weight = torch.randn(15, 16), torch.randn(4, features, 16)
    gradients = torch.ones(15, features)
    rows[11:] = gradients[11:] = torch.nan

    def run(x):
        leaves = weight.clone().requires_grad_(), torch.ones(4, features, requires_grad=True)
        out = grouped_linear(x, leaves[0], offsets, leaves[1])
        out.backward(gradients[: len(x)])
        return out[:11], *(leaf.grad for leaf in leaves)

    for found, expected in zip(run(rows), run(rows[:11]), strict=True):
        torch.testing.assert_close(found, expected)
    assert experts_of_rows(offsets, 13).tolist() == [0] * 3 + [2] * 6 + [3] * 4


def test_no_rows_at_all():
    weight = torch.randn(4, 8, 16, requires_grad=True)
    x = torch.zeros(0, 16, requires_grad=True)
    out = grouped_linear(x, weight, torch.zeros(4, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_the_reference_has_the_same_outputs():
    offsets = torch.tensor([1, 4, 4, 6], dtype=torch.int32)
    x, weight = torch.randn(6, 16), torch.randn(4, 8, 16)
    torch.testing.assert_close(grouped_linear(x, weight, offsets), grouped_linear_reference(x, weight, offsets))
