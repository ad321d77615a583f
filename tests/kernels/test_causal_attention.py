"""Causal attention on a CPU against torch's operator."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels import causal_attention, matmul
from megalaunch.kernels.causal_attention import blocks_are_faster, causal_sdpa_cpu


@pytest.mark.parametrize("tokens", [2, 32, 33, 100])
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 512), (torch.float32, 1), (torch.bfloat16, 512)])
def test_output_and_gradients_are_those_of_torch(tokens, groups, dtype, kept, monkeypatch):
    monkeypatch.setattr(causal_attention, "_KEPT", kept)
    torch.manual_seed(0)
    heads = [torch.randn(2, tokens, n, 8).transpose(1, 2).to(dtype) for n in (6, groups, groups)]
    dout = torch.randn(2, 6, tokens, 8).to(dtype)
    # The reference is fp32 on the same numbers: torch's own bf16 is further from it than ours.
    reference = [x.float().clone().requires_grad_() for x in heads]
    mine = [x.requires_grad_() for x in heads]
    expected = F.scaled_dot_product_attention(*reference, is_causal=True, scale=0.3, enable_gqa=True)
    found = causal_sdpa_cpu(*mine, 0.3)
    assert found.dtype == dtype
    expected.backward(dout.float())
    found.backward(dout)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(mine, reference, strict=True))]
    for one, other in pairs:
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(
    ("tokens", "dtype", "expected"), [(512, torch.float32, 1), (513, torch.float32, 0), (512, torch.bfloat16, 0)]
)
def test_weights_are_kept_where_they_are_few(tokens, dtype, expected):
    q, k, v = (torch.randn(1, 2, tokens, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    held = []

    def save(tensor):
        held.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        causal_sdpa_cpu(q, k, v, 0.3)
    weights = sum(held) - q.numel() - k.numel() - v.numel()
    block = 128  # queries, at one head a group: half of the square, and half of a block's more
    assert weights == expected * 2 * tokens * (tokens + block) // 2


@pytest.mark.parametrize("unit", [None, "AMX"])
def test_where_torch_is_faster_it_is_left_to_it(unit, monkeypatch):
    monkeypatch.setattr(matmul, "_unit", lambda: unit)
    fp32, bf16 = torch.float32, torch.bfloat16
    cases = {(1, fp32): False, (1024, fp32): True, (1025, fp32): False, (1, bf16): False, (4096, bf16): unit is None}
    found = {case: blocks_are_faster(torch.empty(1, 64, case[0], 1, dtype=case[1])) for case in cases}
    assert found == cases
    assert not blocks_are_faster(torch.empty(1, 64, 128, 1, device="meta"))
