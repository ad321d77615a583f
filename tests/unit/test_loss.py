"""The loss of half-precision logits is summed in fp32, over the labels that count."""

import torch
import torch.nn.functional as F

from megalaunch.engine.mesh import Axis
from megalaunch.engine.train.loss import IGNORED, summed_token_loss


def test_half_formats_lose_nothing_in_the_sum():
    logits = torch.randn(2, 300, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(600).view(2, 300) % 50
    labels[1, 200:] = IGNORED
    loss = summed_token_loss(logits, labels, Axis("tp"))
    each = -F.log_softmax(logits.double(), dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), each[labels != IGNORED].sum(), rtol=1e-6, atol=0)
