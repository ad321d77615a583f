"""Rotary position embedding: its backward pass, and the form for one new token."""

import pytest
import torch

from megalaunch.engine.model import rope as rope_module
from megalaunch.engine.model.config import RopeConfig
from megalaunch.engine.model.rope import RopeCache, apply_rope, rope_cos_sin


def test_a_rotation_is_undone_by_its_backward_pass():
    angles = torch.rand(10, 4).repeat(1, 2)
    rotation = RopeCache(angles.cos(), angles.sin())
    x = torch.randn(1, 3, 10, 12, requires_grad=True)  # 8 numbers of each head turn, 4 do not
    turned = apply_rope(x, rotation)
    turned.backward(turned.detach())
    torch.testing.assert_close(x.grad, x.detach())
    assert (turned - x).detach()[..., 1:, :8].abs().max() > 0.1


def test_the_matrix_of_one_new_token_rotates_alike():
    rope, x = RopeConfig(theta=100.0, rotary_dim=8), torch.randn(2, 3, 1, 12)
    for positions in (torch.tensor([7]), torch.tensor([[7], [3]])):
        expected = apply_rope(x, rope_cos_sin(positions, rope, x.dtype))
        with torch.inference_mode():
            rotation = rope_cos_sin(positions, rope, x.dtype)
            assert rotation.matrix is not None
            torch.testing.assert_close(apply_rope(x, rotation), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("replaced", [False, True])
def test_queries_and_keys_are_rotated_in_one_launch_unless_a_package_replaces_apply_rope(monkeypatch, replaced):
    launches = []

    def fused(heads, cos, sin):
        launches.append(len(heads))
        return tuple(x.clone() for x in heads)

    monkeypatch.setattr(rope_module, "fuses_rope", lambda x: True)
    monkeypatch.setattr(rope_module, "rope_fused", fused)
    monkeypatch.setattr(
        rope_module, "is_overridden", lambda name, x: replaced and name == "engine.model.rope.apply_rope"
    )
    table = torch.ones(3, 8)
    rotated = rope_module.apply_rope_to_both(torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), RopeCache(table, table))
    assert [x.shape[1] for x in rotated] == [4, 2]
    assert launches == ([1, 1] if replaced else [2])
