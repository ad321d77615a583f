"""Gated attention against the full-attention layer of transformers' Qwen3-Next, and by its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import small_spec

from megalaunch.engine.model.attention.attention import Attention
from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.build import build_decoder, make_decoder_config
from megalaunch.engine.model.rope import rope_cos_sin

LENGTH, HEADS, WIDTH = 12, 6, 8
QWEN3_NEXT = {
    "qk_norm": "head",
    "norm_plus_one": True,
    "head_dim": WIDTH,
    "rope": {"fraction": 0.5},
    "attention_output_gate": True,
}


def _attention(**values: Any) -> Attention:
    """One layer's attention, with weights that show a fault."""
    spec = small_spec(**{f"model__{key}": value for key, value in (QWEN3_NEXT | values).items()})
    layer = build_decoder(spec.model).layers["0"]
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.attention.parameters():
        parameter.data.normal_(0.0, 0.4, generator=generator)
    return layer.attention


def _rotation(attention: Attention) -> Any:
    rotated = make_decoder_config(small_spec(model__head_dim=WIDTH, model__rope={"fraction": 0.5}).model).layers[0].rope
    return rope_cos_sin(torch.arange(LENGTH), rotated, attention.q_proj.weight.dtype)


def _theirs(bias: bool) -> Any:
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

    config = Qwen3NextConfig(
        hidden_size=24,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=WIDTH,
        attention_bias=bias,
        rms_norm_eps=1e-5,
    )
    config._attn_implementation = "eager"
    return Qwen3NextAttention(config, 0)


def _in_their_order(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each head's rows of the query, then those of its gate, in one projection; all else by the same names."""
    theirs = {name: value for name, value in ours.items() if not name.startswith("gate_proj.")}
    for name, gate in ours.items():
        if name.startswith("gate_proj."):
            query = name.replace("gate_proj", "q_proj")
            by_head = [part.unflatten(0, (HEADS, WIDTH)) for part in (ours[query], gate)]
            theirs[query] = torch.cat(by_head, dim=1).flatten(0, 1)
    return theirs


@pytest.mark.parametrize("bias", [False, True])
def test_output_and_every_gradient_are_those_of_transformers(bias):
    ours = _attention(qkv_bias=bias, attention_output_bias=bias)
    theirs = _theirs(bias)
    weights = _in_their_order({name: parameter.detach() for name, parameter in ours.named_parameters()})
    with torch.no_grad():
        assert weights.keys() == dict(theirs.named_parameters()).keys()
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name])
    x = torch.randn(2, LENGTH, 24, generator=torch.Generator().manual_seed(3))
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    rotation = _rotation(ours)
    cos_sin = rotation.cos[None], rotation.sin[None]
    hidden = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    out, expected = ours(mine, rotation, causal_attention), theirs(its, cos_sin, hidden)[0]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for result in (out, expected):
        result.square().sum().backward()
    torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-4)
    gradients = _in_their_order({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max().item()
        assert difference <= 1e-5 * parameter.grad.abs().max().item(), name


def test_a_closed_gate_stops_the_output_of_its_head_alone():
    attention = _attention(qkv_bias=True, attention_output_bias=False)
    attention.gate_proj.weight.data.zero_()
    attention.gate_proj.bias.data.fill_(40.0)  # the sigmoid is 1
    x = torch.randn(1, LENGTH, 24, generator=torch.Generator().manual_seed(3))
    rotation = _rotation(attention)
    heads = attention.o_proj.weight.data.clone().unflatten(1, (HEADS, WIDTH))
    with torch.no_grad():
        attention.gate_proj.bias.unflatten(0, (HEADS, WIDTH))[2] = -200.0
        gated = attention(x, rotation, causal_attention)
        attention.gate_proj.bias.fill_(40.0)
        heads[:, 2] = 0
        attention.o_proj.weight.copy_(heads.flatten(1))
        torch.testing.assert_close(gated, attention(x, rotation, causal_attention))
    assert gated.abs().max() > 0.1
