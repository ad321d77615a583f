"""The decoder against first principles: causality, grouped queries, rotation, initial weights."""

import math
from dataclasses import replace

import pytest
import torch
from oracle import small_spec

from megalaunch.engine.model.attention.core import causal_attention
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.config import NormConfig, RopeConfig
from megalaunch.engine.model.init import init_weights
from megalaunch.engine.model.init_value import init_value
from megalaunch.engine.model.layers import Norm
from megalaunch.engine.model.rope import apply_rope, rope_cos_sin
from megalaunch.plan.parameters import count_parameters


@pytest.fixture(scope="module")
def model():
    decoder = build_decoder(small_spec().model)
    init_weights(decoder, 3)
    return decoder


def test_a_position_sees_only_its_past(model):
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :6], after[0, :6])
    assert not torch.allclose(before[0, 6:], after[0, 6:])


def test_parameter_count_is_the_planners():
    for spec in (small_spec(), small_spec(model__tie_word_embeddings=True)):
        decoder = build_decoder(spec.model)
        assert sum(p.numel() for p in decoder.parameters()) == count_parameters(spec.model).total


def test_experts_are_counted_and_initialized():
    moe = {
        "num_experts": 4,
        "ffn_hidden_size": 24,
        "shared_ffn_hidden_size": 16,
        "shared_expert_gate": True,
        "router_bias": True,
        "first_k_dense_replace": 1,
        "score": "sigmoid",
        "balance_bias": True,
    }
    spec = small_spec(model__moe=moe, model__mlp_bias=True).model
    decoder = build_decoder(spec)
    init_weights(decoder, 3)
    assert sum(p.numel() for p in decoder.parameters()) == count_parameters(spec).total
    assert [hasattr(layer.mlp, "experts") for layer in decoder.layers.values()] == [False] + [True] * (
        spec.num_layers - 1
    )
    block = decoder.layers["1"].mlp
    assert block.router.expert_bias.tolist() == block.router.bias.tolist() == [0.0] * 4
    assert not block.experts.gate_proj.bias.any()
    assert not block.experts.down_proj.bias.any()
    ratio = block.experts.down_proj.weight.std() / block.experts.up_proj.weight.std()
    assert ratio.item() == pytest.approx((2 * spec.num_layers) ** -0.5, rel=0.1)
    assert block.experts.up_proj.weight[0].ne(block.experts.up_proj.weight[1]).all()


@pytest.mark.parametrize("queries", [1, 3, 7])
def test_attention_by_definition(queries):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, queries, 4, generator=generator)
    k, v = (torch.randn(2, 2, 7, 4, generator=generator) for _ in range(2))
    scores = q @ k.repeat_interleave(3, dim=1).mT / math.sqrt(4)
    future = torch.arange(7)[None, :] > torch.arange(7 - queries, 7)[:, None]
    expected = scores.masked_fill(future, -math.inf).softmax(-1) @ v.repeat_interleave(3, dim=1)
    torch.testing.assert_close(causal_attention(q, k, v), expected, rtol=1e-5, atol=1e-6)


def test_rotation_turns_pairs_and_depends_on_distance_only():
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    y = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(1))

    def score(first, second):
        rope = RopeConfig(theta=100.0, rotary_dim=8)
        a = apply_rope(x, rope_cos_sin(torch.tensor([first]), rope, torch.float32))
        b = apply_rope(y, rope_cos_sin(torch.tensor([second]), rope, torch.float32))
        return (a * b).sum().item()

    assert score(5, 2) == pytest.approx(score(13, 10), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-3)
    two = RopeConfig(theta=100.0, rotary_dim=2)
    pair = apply_rope(torch.tensor([[1.0, 0.0]]), rope_cos_sin(torch.tensor([1]), two, torch.float32))
    assert pair.tolist()[0] == pytest.approx([math.cos(1), math.sin(1)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_by_definition(dtype):
    norm = Norm(6, NormConfig(0.5)).to(dtype)
    norm.weight.data = torch.arange(1, 7).to(dtype)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * torch.arange(1, 7)
    torch.testing.assert_close(norm(x), expected.to(dtype))


def test_initial_weights_depend_on_seed_and_name_only(model):
    config = model.config
    one = init_value("layers.0.mlp.up_proj.weight", torch.Size([40, 24]), config, 3)
    assert torch.equal(one, dict(model.named_parameters())["layers.0.mlp.up_proj.weight"])
    assert not torch.equal(one, init_value("layers.1.mlp.up_proj.weight", torch.Size([40, 24]), config, 3))
    assert not torch.equal(one, init_value("layers.0.mlp.up_proj.weight", torch.Size([40, 24]), config, 4))


def test_initial_spread(model):
    config = replace(model.config, layers=model.config.layers[:1] * 8)
    shape = torch.Size([400, 400])
    plain = init_value("layers.0.attention.q_proj.weight", shape, config, 0).std().item()
    writer = init_value("layers.0.attention.o_proj.weight", shape, config, 0).std().item()
    assert plain == pytest.approx(config.init_std, rel=0.02)
    assert writer == pytest.approx(config.init_std / 4, rel=0.02)
    assert init_value("norm.weight", torch.Size([5]), config, 0).tolist() == [1] * 5
    table = replace(config, embedding_init_std=3.0)
    assert init_value("embedding.weight", shape, table, 0).std().item() == pytest.approx(3.0, rel=0.02)
    assert init_value("head.weight", shape, table, 0).std().item() == pytest.approx(config.init_std, rel=0.02)


def test_an_open_vocabulary_is_named():
    with pytest.raises(ValueError, match="vocab_size"):
        build_decoder(replace(small_spec().model, vocab_size=None))
