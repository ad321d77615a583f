"""Latent attention against transformers' DeepSeek-V2 and V3: one layer, and dense models of both forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import small_spec

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.weight_maps.latent_attention import latent_attention_mapping
from megalaunch.engine.weight_maps.llama import embedding_and_head_mapping, mlp_mapping, norm_mapping
from megalaunch.plan.parameters import count_parameters
from megalaunch.schema.model import ModelSpec

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

TOKENS = torch.randint(0, 53, (2, 24), generator=torch.Generator().manual_seed(3))
YARN = {"scaling": "yarn", "factor": 4.0, "original_positions": 8, "mscale": 0.707, "mscale_all_dim": 0.9}
# Each: the fields of the model section that differ from those of `_model`.
FORMS: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3, queries without a latent": {"q_lora_rank": None},
    "v3, values wider than keys": {"v_head_dim": 20},
    "v3, yarn": {"rope": YARN},
    "v3, yarn, mscale alone": {"rope": {**YARN, "mscale_all_dim": 0.0, "mscale": 1.0}},
    "v3, another epsilon": {"norm_epsilon": 1e-3},
    "v2": {},
    "v2, queries without a latent": {"q_lora_rank": None},
    "v2, yarn": {"rope": YARN},
}


def _model(**values: Any) -> ModelSpec:
    mla = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
    mla |= {key: values.pop(key) for key in list(values) if key in mla}
    width = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
    shape = {"num_attention_heads": 4, "num_query_groups": 4, "head_dim": width, "vocab_size": 53}
    fields = {"mla": mla, **shape, "family": "deepseek_v3", **values}
    return small_spec(**{f"model__{key}": value for key, value in fields.items()}).model


def _theirs(name: str, model: ModelSpec) -> Any:
    """The dense model of transformers with the section's shape, with weights that show a fault."""
    kind = transformers.DeepseekV2Config if name.startswith("v2") else transformers.DeepseekV3Config
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope.theta}
    if model.rope.scaling == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": model.rope.factor,
            "original_max_position_embeddings": model.rope.original_positions,
            "mscale_all_dim": model.rope.mscale_all_dim,
            **({"mscale": model.rope.mscale} if model.rope.mscale_all_dim else {}),
        }
    config = kind(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        first_k_dense_replace=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_attention_heads,
        kv_lora_rank=model.mla.kv_lora_rank,
        q_lora_rank=model.mla.q_lora_rank,
        qk_nope_head_dim=model.mla.qk_nope_head_dim,
        qk_rope_head_dim=model.mla.qk_rope_head_dim,
        v_head_dim=model.mla.v_head_dim,
        rms_norm_eps=model.norm_epsilon,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters=rope,
        pad_token_id=None,
    )
    torch.manual_seed(sum(name.encode()))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    return theirs


def _mappings(model: ModelSpec):
    yield from embedding_and_head_mapping(model)
    for index in range(model.num_layers):
        theirs, ours = f"model.layers.{index}.", f"layers.{index}."
        yield from latent_attention_mapping(model, f"{theirs}self_attn.", f"{ours}attention.")
        yield from mlp_mapping(model, f"{theirs}mlp.", f"{ours}mlp.")
        yield from norm_mapping(model, theirs, ours)


@pytest.mark.parametrize("name", FORMS)
def test_a_dense_model_has_the_logits_and_gradients_of_transformers(name):
    model = _model(**FORMS[name])
    ours, theirs = build_decoder(model), _theirs(name, model)
    weights, parameters = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for pair in _mappings(model):
        values = pair.to_ours([weights[key].detach() for key in pair.theirs])
        for key, value in zip(pair.ours, values, strict=True):
            parameters[key].data.copy_(value)
        back = pair.to_theirs(values)
        assert all(torch.equal(weights[key], value) for key, value in zip(pair.theirs, back, strict=True))

    for logits in (ours(TOKENS), theirs(TOKENS).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)
    compared = set()
    for pair in _mappings(model):
        for key, expected in zip(pair.ours, pair.to_ours([weights[key].grad for key in pair.theirs]), strict=True):
            assert (parameters[key].grad - expected).abs().max() <= 1e-5 * expected.abs().max(), key
            compared.add(key)
    assert compared == set(parameters)


@pytest.mark.parametrize("name", ["v3", "v3, queries without a latent", "v3, values wider than keys"])
def test_the_planner_counts_its_parameters(name):
    model = _model(**FORMS[name])
    assert count_parameters(model).total == sum(parameter.numel() for parameter in build_decoder(model).parameters())


def test_norms_of_latents_have_the_published_epsilon():
    """transformers has no key for it; a model's own rms_norm_eps, 1e-5 in Moonlight, is that of the other norms."""
    attention = build_decoder(replace(_model(), norm_epsilon=1e-5)).layers["0"].attention
    assert [attention.q_a_norm.config.epsilon, attention.kv_a_norm.config.epsilon] == [1e-6, 1e-6]
