"""Cases of kernels/rope_triton.py for tests/kernels/test_triton.py."""

from functools import partial

import torch
from triton_comparison import compare, randn

from megalaunch.engine.model.rope import RopeCache, apply_rope
from megalaunch.kernels.rope import rope_fused


def rope_case(
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    tokens: int = 5,
    heads: tuple[int, ...] = (4, 2),
    width: int = 16,
    rotated: int = 16,
    per_sample: bool = False,
    layout: str = "by token",
) -> None:
    """Rotated heads and their gradients; tables are larger than 1 as those of YaRN."""
    angles = randn(*((2, 1, tokens) if per_sample else (tokens,)), rotated // 2, seed=7) * 3
    cache = RopeCache(*((1.2 * both).to(device, dtype) for both in _both(angles)))
    sizes = [(2, tokens, count, width) for count in heads]
    made = [randn(*size, seed=i).to(device, dtype).transpose(1, 2) for i, size in enumerate((*sizes, *sizes))]
    if layout == "by head":
        made = [x.contiguous() for x in made]
    elif layout == "parts of heads":
        made = [torch.nn.functional.pad(x, (0, 4))[..., :-4] for x in made]
    elif layout == "features apart":
        made = [torch.stack((x, x), dim=-1)[..., 0] for x in made]
    results = []
    for exact in (False, True):
        wide = torch.Tensor.double if exact else torch.Tensor.detach
        values = [wide(x).detach() for x in made]
        leaves, upstream = [x.requires_grad_() for x in values[: len(heads)]], values[len(heads) :]
        if exact:
            rotation = RopeCache(cache.cos.double(), cache.sin.double())
            out = tuple(apply_rope(x, rotation) for x in leaves)
        else:
            out = rope_fused(leaves, cache.cos, cache.sin)
            assert [x.dtype for x in out] == [dtype] * len(heads)
        results.append([*(x.detach() for x in out), *torch.autograd.grad(out, leaves, upstream)])
    compare(*results, dtype)


def _both(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    twice = torch.cat((angles, angles), dim=-1)
    return twice.cos(), twice.sin()


ROPE_CASES = {
    "rope": rope_case,
    "rope in bf16": partial(rope_case, dtype=torch.bfloat16),
    "rope in fp16, by head": partial(rope_case, dtype=torch.float16, layout="by head"),
    "rope in fp64": partial(rope_case, dtype=torch.float64),
    "rope of one token": partial(rope_case, tokens=1, heads=(3, 1)),
    "rope of a part of the features": partial(rope_case, width=22, rotated=12),
    "rope of positions of each sample": partial(rope_case, per_sample=True, dtype=torch.bfloat16, width=20, rotated=20),
    "rope of queries alone": partial(rope_case, heads=(5,), per_sample=True),
    "rope of many heads": partial(rope_case, heads=(70, 3), width=128, rotated=128, tokens=2),
    "rope, not contiguous": partial(rope_case, layout="features apart", rotated=8),
    "rope of parts of heads": partial(rope_case, layout="parts of heads"),
    "rope without tokens": partial(rope_case, tokens=0),
}
