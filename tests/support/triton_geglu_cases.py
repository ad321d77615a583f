"""Cases of kernels/geglu_triton.py for tests/kernels/test_triton.py."""

from functools import partial

import torch
from triton_comparison import compare, randn

from megalaunch.kernels.geglu import GegluVariant, geglu_fused, geglu_reference


def geglu_case(
    size: tuple[int, ...], device: str, dtype: torch.dtype, variant: GegluVariant, transposed: bool = False
) -> None:
    """Output and both gradients; gates reach the tails of GELU."""
    scales = (4, 2, 2)
    inputs = [(scale * randn(*size, seed=i)).to(device, dtype) for i, scale in enumerate(scales)]
    results = []
    for exact in (False, True):
        gate, up, upstream = [(x.mT if transposed else x).to(torch.float64 if exact else dtype) for x in inputs]
        leaves = [x.detach().requires_grad_() for x in (gate, up)]
        out = (geglu_reference if exact else geglu_fused)(*leaves, variant)
        if not exact:
            saved = out.grad_fn.saved_tensors
            assert [x.shape for x in saved] == [gate.shape] * 2, "as many values as SwiGLU saves"
        results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
    assert [x.dtype for x in results[0]] == [dtype] * 3
    compare(*results, dtype)


def far_gates_case(device: str, variant: GegluVariant) -> None:
    """Gates where GELU is 0 or its argument: no overflow becomes NaN."""
    gate = torch.tensor([-300.0, -20.0, 20.0, 300.0, 6e4], device=device)
    up, upstream = torch.full_like(gate, 2.0), torch.ones_like(gate)
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    d_gate, d_up = torch.autograd.grad(geglu_fused(*leaves, variant), leaves, upstream)
    factor = 3.0 if variant == "quick_geglu" else 2.0
    torch.testing.assert_close(d_gate.cpu(), torch.tensor([0, 0, 1, 1, 1]) * factor)
    torch.testing.assert_close(d_up.cpu(), gate.detach().cpu().clamp(min=0))


_VARIANTS: tuple[GegluVariant, ...] = ("geglu", "geglu_tanh", "quick_geglu")
GEGLU_CASES = {
    **{
        f"{variant} {size} {dtype}": partial(geglu_case, size, dtype=dtype, variant=variant)
        for variant in _VARIANTS
        for size, dtype in (
            ((7,), torch.float32),
            ((3, 5, 50), torch.bfloat16),
            ((1024,), torch.float16),
            ((2, 1025), torch.bfloat16),
            ((2, 1025), torch.float32),
        )
    },
    **{f"{name}, far gates": partial(far_gates_case, variant=name) for name in _VARIANTS},
    "geglu of nothing": partial(geglu_case, (0, 4), dtype=torch.float32, variant="geglu"),
    "geglu, not contiguous": partial(geglu_case, (5, 9), dtype=torch.float32, variant="geglu_tanh", transposed=True),
}
