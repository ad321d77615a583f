"""Permutation by expert and back, against plain indexing and autograd of it."""

import pytest
import torch

from megalaunch.kernels.permute import permute, sort_by_expert, unpermute


@pytest.fixture
def routed():
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])
    ids[ids == 3] = 4  # no token for expert 3
    return torch.randn(7, 6, generator=generator), ids, torch.rand(7, 2, generator=generator)


def test_rows_are_in_the_order_of_experts_then_tokens(routed):
    x, ids, _ = routed
    permutation, counts = sort_by_expert(ids, 5)
    expected = [(expert, pair) for expert in range(5) for pair in range(14) if ids.flatten()[pair] == expert]
    assert permutation.pairs_R.tolist() == [pair for _, pair in expected]
    assert permutation.rows_Tk.flatten()[permutation.pairs_R].tolist() == list(range(14))
    assert counts.tolist() == [sum(expert == e for expert, _ in expected) for e in range(5)]
    assert counts[3] == 0
    assert torch.equal(permute(x, permutation), x[[pair // 2 for _, pair in expected]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_indexing(routed, dtype):
    x, ids, weights = routed
    permutation, _ = sort_by_expert(ids, 5)
    factors = torch.arange(1.0, 15.0)[:, None]
    upstream = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))

    def run(through):
        leaves = x.clone().to(dtype).requires_grad_(), weights.clone().requires_grad_()
        out = through(*leaves)
        out.backward(upstream.to(out.dtype))
        return out, *(leaf.grad for leaf in leaves)

    def ours(x_TH, weights_Tk):
        return unpermute(permute(x_TH, permutation) * factors.to(dtype), permutation, weights_Tk)

    def plain(x_TH, weights_Tk):
        rows = x_TH.float()[permutation.pairs_R // 2] * factors
        weighted = rows * weights_Tk.flatten()[permutation.pairs_R][:, None]
        return torch.zeros(7, 6).index_add(0, permutation.pairs_R // 2, weighted)

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-1}
    for found, expected in zip(run(ours), run(plain), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), **tolerance)
