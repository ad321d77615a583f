"""Rotary position embedding: its backward pass."""

import torch

from megalaunch.engine.model.rope import RopeCache, apply_rope


def test_a_rotation_is_undone_by_its_backward_pass():
    angles = torch.rand(10, 4).repeat(1, 2)
    rotation = RopeCache(angles.cos(), angles.sin())
    x = torch.randn(1, 3, 10, 12, requires_grad=True)  # 8 numbers of each head turn, 4 do not
    turned = apply_rope(x, rotation)
    turned.backward(turned.detach())
    torch.testing.assert_close(x.grad, x.detach())
    assert (turned - x).detach()[..., 1:, :8].abs().max() > 0.1
