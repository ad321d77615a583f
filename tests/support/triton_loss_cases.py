"""Linear and cross-entropy by Triton kernels against plain torch in fp64, for tests/kernels/test_triton.py.

Also with a sharded vocabulary: every rank's kernels run in this process, with the collectives between them.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_comparison import compare, randn

from megalaunch.kernels.linear_loss import triton_kernels

IGNORED = -100


def _reference(logits: Tensor, labels: Tensor, tokens: int, cap: float | None) -> list[Tensor]:
    """Each token's loss and the gradient of the logits, in fp64."""
    leaf = logits.double().requires_grad_()
    capped = leaf if cap is None else cap * torch.tanh(leaf / cap)
    losses = F.cross_entropy(capped[:, :tokens], labels, ignore_index=IGNORED, reduction="none")
    return [losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]]


def _columns(labels: Tensor, start: int, width: int) -> Tensor:
    columns = labels - start
    return columns.where((columns >= 0) & (columns < width), -1)


def loss_case(
    device: str,
    rows: int,
    width: int,
    dtype: torch.dtype,
    *,
    padding: int = 0,
    shards: int = 1,
    cap: float | None = None,
    scale: float = 3.0,
) -> None:
    """Loss and gradient of logits with ignored labels; the last `padding` columns of all belong to no token."""
    tokens, part = width - padding, width // shards
    logits = (randn(rows, width) * scale).to(device, dtype)
    labels = torch.randint(0, tokens, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    labels[1::3] = IGNORED
    expected, kernels = _reference(logits, labels, tokens, cap), triton_kernels()
    strided = torch.full((rows, width + 3), 7.0, dtype=dtype, device=device)  # rows that do not touch each other
    strided[:, :width] = logits
    whole = (
        kernels.loss_and_gradient(strided[:, :width], _columns(labels, 0, width), tokens, cap) if shards == 1 else None
    )

    starts = range(0, width, part)
    ranks = [logits[:, start : start + part] for start in starts]
    used = [min(max(tokens - start, 0), part) for start in starts]
    columns = [_columns(labels, start, part) for start in starts]
    found = [kernels.sums(*rank, cap) for rank in zip(ranks, columns, used, strict=True)]
    largest = torch.stack([each[0] for each in found]).amax(0)
    log_sums = largest + sum(each[1] * (each[0] - largest).exp() for each in found).log()
    counted = (labels != IGNORED).float()
    for logits_Tv, each, own in zip(ranks, columns, used, strict=True):
        kernels.write_gradient(logits_Tv, each, log_sums, counted, own, cap)
    losses = (log_sums - sum(each[2] for each in found)) * counted

    compare([losses, logits], expected, dtype)
    assert (strided[:, width:] == 7).all(), "nothing behind a row is written"
    if whole is not None:
        compare([whole, strided[:, :width]], expected, dtype)


def special_values_case(device: str) -> None:
    """NaN and infinity make the row's loss NaN, so that the step is seen to be bad; other rows stay finite."""
    logits = torch.zeros(4, 20, device=device)
    logits[0, 3], logits[1, 3], logits[2, 3] = float("nan"), float("inf"), -float("inf")
    losses = triton_kernels().loss_and_gradient(logits, torch.zeros(4, dtype=torch.int64, device=device), 20, None)
    assert losses.isnan().tolist() == [True, True, False, False]
    torch.testing.assert_close(losses[2:].cpu(), torch.tensor([19.0, 20.0]).log())


LOSS_CASES = {
    **{
        f"loss of {rows} x {width} {dtype}": partial(loss_case, rows=rows, width=width, dtype=dtype)
        for rows, width in ((7, 50), (2, 1), (3, 256), (2, 16387))
        for dtype in (torch.float32, torch.bfloat16)
    },
    "loss in fp16": partial(loss_case, rows=4, width=300, dtype=torch.float16),
    "loss of no tokens": partial(loss_case, rows=0, width=30, dtype=torch.float32),
    "loss with padding": partial(loss_case, rows=5, width=64, padding=15, dtype=torch.float32),
    "loss with padding of two blocks": partial(loss_case, rows=2, width=8300, padding=120, dtype=torch.float32),
    "loss with a cap": partial(loss_case, rows=5, width=64, cap=3.0, dtype=torch.float32),
    "loss with a cap, bf16": partial(loss_case, rows=5, width=64, cap=30.0, dtype=torch.bfloat16, scale=30.0),
    "loss of large logits": partial(loss_case, rows=5, width=64, scale=1e4, dtype=torch.float32),
    "loss of 4 shards, one of padding": partial(
        loss_case, rows=9, width=64, padding=20, shards=4, cap=3.0, dtype=torch.float32
    ),
    "loss of 2 shards, bf16": partial(loss_case, rows=9, width=64, shards=2, dtype=torch.bfloat16),
    "loss of special values": special_values_case,
}
