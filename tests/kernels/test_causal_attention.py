"""Causal attention on a CPU against torch's operator."""

import pytest
import torch
import torch.nn.functional as F

from megalaunch.kernels import causal_attention, matmul
from megalaunch.kernels.causal_attention import (
    blocks_are_faster,
    causal_sdpa,
    causal_sdpa_cpu,
    causal_sdpa_reference,
    masked_sdpa,
    sdpa_by,
)
from megalaunch.kernels.forms import KernelForms, use_kernel_forms


@pytest.mark.parametrize("tokens", [2, 32, 33, 100])
@pytest.mark.parametrize(("groups", "values"), [(1, 8), (2, 8), (6, 8), (2, 5), (6, 11)])
@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, 512), (torch.float32, 1), (torch.bfloat16, 512)])
def test_output_and_gradients_are_those_of_torch(tokens, groups, dtype, kept, values, monkeypatch):
    monkeypatch.setattr(causal_attention, "_KEPT", kept)
    torch.manual_seed(0)
    shapes = ((6, 8), (groups, 8), (groups, values))
    heads = [torch.randn(2, tokens, *shape).transpose(1, 2).to(dtype) for shape in shapes]
    dout = torch.randn(2, 6, tokens, values).to(dtype)
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


@pytest.mark.parametrize("values", [5, 11])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_of_two_widths_take_the_fused_kernel(values, masked):
    """Its backward holds no weights of all pairs of tokens."""
    q, k = (torch.randn(2, 3, 70, 8, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 3, 70, values, requires_grad=True)
    mask = torch.ones(70, 70, dtype=torch.bool).tril()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (held.append(x.numel()), x)[1], lambda x: x):
        found = masked_sdpa(q, k, v, mask, 0.3) if masked else causal_sdpa_reference(q, k, v, 0.3)
    assert max(held) < 2 * 3 * 70 * 70
    expected = ((q @ k.mT) * 0.3).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, (q, k, v), dout) for out in (found, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


CALLS = {
    "no mask": (lambda q, k, v, mask: causal_sdpa(q, k, v, 0.3), False),
    "no mask, flash": (lambda q, k, v, mask: sdpa_by("flash", q, k, v, None, 0.3), False),
    "mask": (lambda q, k, v, mask: masked_sdpa(q, k, v, mask, 0.3), True),
    "no mask, efficient": (lambda q, k, v, mask: sdpa_by("efficient", q, k, v, None, 0.3), True),
    "mask, efficient": (lambda q, k, v, mask: sdpa_by("efficient", q, k, v, mask, 0.3), True),
}


@pytest.mark.parametrize("call", CALLS)
def test_keys_are_repeated_for_kernels_of_a_gpu_that_take_no_groups(call):
    """The memory-efficient kernel, which is also the one with a mask: else torch computes and holds all scores."""
    attend, repeated = CALLS[call]
    q, k, v = (torch.randn(2, heads, 9, 8) for heads in (6, 2, 2))
    seen = []
    with use_kernel_forms(KernelForms(on_cpu=False, attention=lambda *given: seen.append(given) or given[0])):
        attend(q, k, v, torch.ones(9, 9, dtype=torch.bool).tril())
    ((_, keys, values, _),) = seen
    per_group = 3 if repeated else 1
    assert torch.equal(keys, k.repeat_interleave(per_group, 1))
    assert torch.equal(values, v.repeat_interleave(per_group, 1))


def test_a_mask_on_a_gpu_computes_what_one_on_a_cpu_does(monkeypatch):
    torch.manual_seed(0)
    leaves = [torch.randn(2, heads, 9, 8, requires_grad=True) for heads in (6, 2, 2)]
    mask, dout = torch.ones(9, 9, dtype=torch.bool).tril(), torch.randn(2, 6, 9, 8)
    operator, grouped = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **named: grouped.append(named["enable_gqa"]) or operator(*args, **named),
    )
    results = []
    for on_cpu in (True, False):
        with use_kernel_forms(KernelForms(on_cpu=on_cpu)):
            out = masked_sdpa(*leaves, mask, 0.3)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    assert grouped == [True, False]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


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
