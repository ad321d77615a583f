"""FLOPs and parameters against figures that others published or computed."""

import pytest
from made_specs import resolved

from megalaunch.plan.batch import samples_requested, tokens_per_step
from megalaunch.plan.flops import flops_per_token, step_flops
from megalaunch.plan.layers import list_layers
from megalaunch.plan.parameters import count_parameters, layer_parameters
from megalaunch.plan.world import exact_quotient


def spec_of(*overrides):
    return resolved("recipe=tiny", "data.corpus=x", *overrides)[0]


def test_megatrons_flops_of_a_small_model():
    """Golden: Megatron-LM's own function, L=4 h=512 n=8 ffn=2048 swiglu s=1024 batch=8 V=32000."""
    spec = spec_of(
        *("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8", "model.num_query_groups=null"),
        *("model.ffn_hidden_size=2048", "model.vocab_size=32000"),
        *("batch.sequence_length=1024", "batch.global_batch_size=8"),
    )
    assert step_flops(spec) == 1_733_019_303_936


def test_megatrons_flops_of_llama3_8b():
    """Golden: Megatron-LM's own function, one sample of 8192."""
    spec = spec_of("model=llama3_8b", "batch.sequence_length=8192", "batch.global_batch_size=1")
    assert step_flops(spec) == 421_645_529_382_912
    assert flops_per_token(spec) == pytest.approx(51.47e9, rel=1e-3)


def test_megatrons_flops_of_mixtral_8x7b():
    """Golden: Megatron-LM's own function, one sample of 4096."""
    spec = spec_of("model=mixtral_8x7b", "batch.sequence_length=4096", "batch.global_batch_size=1")
    assert step_flops(spec) == 326_477_644_038_144


def test_megatrons_flops_of_deepseek_v3():
    """Golden: Megatron-LM's own function, one sample of 4096: latent attention, 3 dense layers, one further depth."""
    spec = spec_of("model=deepseek_v3", "batch.sequence_length=4096", "batch.global_batch_size=1")
    assert step_flops(spec) == 1_064_931_126_411_264


@pytest.mark.parametrize(
    ("option", "length", "causal", "full"),
    [
        ("llama3_8b", 8192, 51.47e9, 57.91e9),
        ("llama32_1b", 8192, 9.025e9, 10.64e9),
        ("qwen3_8b", 4096, 49.03e9, None),  # Megatron-Bridge: 512.7 TFLOP/s at 10,456 tokens/s
    ],
)
def test_flops_of_a_token_are_those_that_others_report(option, length, causal, full):
    spec = spec_of(f"model={option}", f"batch.sequence_length={length}", "batch.global_batch_size=1")
    assert flops_per_token(spec) == pytest.approx(causal, rel=1e-3)
    if full is not None:
        assert flops_per_token(spec, full_attention=True) == pytest.approx(full, rel=1e-3)


def test_full_attention_counts_the_masked_half_too():
    spec = spec_of("model=deepseek_v2_lite", "batch.sequence_length=1024", "batch.global_batch_size=1")
    extra = step_flops(spec, full_attention=True) - step_flops(spec)
    assert extra == 27 * 3 * 1024**2 * 16 * (128 + 64 + 128)


def test_a_direct_query_projection_has_no_latent():
    """Megatron's formula with q_lora_rank unset: h * n * (qk + rope) in place of the two smaller products."""
    one = ("model=deepseek_v2_lite", "batch.sequence_length=1024", "batch.global_batch_size=1")
    direct, narrow = step_flops(spec_of(*one)), step_flops(spec_of(*one, "model.mla.q_lora_rank=512"))
    assert direct - narrow == 27 * 6 * 1024 * (2048 * 16 * 192 - 512 * (2048 + 16 * 192 + 1))


def test_a_plain_feed_forward_block_has_two_matrices():
    gated, plain = (step_flops(spec_of(f"model.activation={name}")) for name in ("swiglu", "squared_relu"))
    assert gated - plain == 2 * 6 * (8 * 32) * 32 * 64


def test_layers_with_experts_and_windows():
    overrides = (
        "model.num_layers=7",
        "model.moe.num_experts=4",
        "model.moe.first_k_dense_replace=1",
        "model.moe.layer_freq=2",
    )
    model = spec_of(
        *overrides, "model.sliding_window=8", "model.sliding_window_pattern=3", "model.mtp.num_layers=2"
    ).model
    layers = list_layers(model)
    assert [layer.index for layer in layers if layer.experts] == [1, 3, 5]
    assert [layer.index for layer in layers if layer.window is None] == [2, 5]
    assert [layer.mtp for layer in layers] == [False] * 7 + [True] * 2
    assert [layer.index for layer in layers] == list(range(9))


def test_further_depths_are_built_like_the_last_layer():
    model = spec_of("model.moe.num_experts=4", "model.moe.layer_freq=2", "model.mtp.num_layers=1").model
    assert [layer.experts for layer in list_layers(model)] == [True, False, False]


BASE = ("model=tiny",)  # 2 layers, hidden 32, ffn 64, 4 heads of 8, 2 groups


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (("model.qkv_bias=true",), 2 * (32 + 16 + 16)),
        (("model.attention_output_bias=true",), 2 * 32),
        (("model.mlp_bias=true",), 2 * (64 + 64 + 32)),
        (("model.mlp_bias=true", "model.activation=gelu"), 2 * (64 + 32 - 32 * 64)),
        (("model.norm=layernorm",), 5 * 32),
        (("model.qk_norm=head",), 2 * (8 + 8)),
        (("model.qk_norm=full",), 2 * (32 + 16)),
        (("model.qk_norm=head", "model.norm=layernorm"), 5 * 32 + 2 * 2 * (8 + 8)),
        (("model.position_embedding=learned", "model.max_position_embeddings=100"), 100 * 32),
        (("model.attention_sinks=true",), 2 * 4),
        (("model.attention_output_gate=true",), 2 * 32 * 32),
        (("model.attention_output_gate=true", "model.qkv_bias=true"), 2 * (32 * 32 + 32 + 32 + 16 + 16)),
        (("model.moe.num_experts=4",), 2 * (3 * 3 * 32 * 64 + 4 * 32)),
        (("model.moe.num_experts=4", "model.moe.router_bias=true"), 2 * (3 * 3 * 32 * 64 + 4 * 33)),
        (("model.moe.num_experts=4", "model.moe.balance_bias=true"), 2 * (3 * 3 * 32 * 64 + 4 * 32)),
        (
            ("model.moe.num_experts=4", "model.moe.ffn_hidden_size=16", "model.moe.shared_ffn_hidden_size=8"),
            2 * (3 * 32 * (4 * 16 + 8 - 64) + 4 * 32),
        ),
        (("model.mtp.num_layers=1",), 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 3 * 32 + 2 * 32 * 32),
    ],
)
def test_each_part_of_a_layer_is_counted(overrides, more):
    assert (
        count_parameters(spec_of(*BASE, *overrides).model).total - count_parameters(spec_of(*BASE).model).total == more
    )


@pytest.mark.parametrize("option", ["llama3_8b", "gpt2_124m", "mixtral_8x7b", "deepseek_v3", "gpt_oss_20b"])
def test_layers_and_the_rest_sum_to_the_total(option):
    model = spec_of(f"model={option}").model
    count = count_parameters(model)
    layers = sum(layer_parameters(model, layer).total for layer in list_layers(model))
    final_norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    assert layers + final_norm + count.embedding + count.positions + count.head == count.total


def test_a_token_meets_its_own_experts_only():
    count = count_parameters(spec_of("model=tiny", "model.moe.num_experts=8", "model.moe.top_k=3").model)
    assert count.total - count.active == count.idle_experts == 2 * 5 * 3 * 32 * 64
    assert count_parameters(spec_of("model=tiny").model).idle_experts == 0


def test_parameters_of_llama3_8b_are_the_published_ones():
    count = count_parameters(spec_of("model=llama3_8b").model)
    assert count.total == 8_030_261_248
    assert count.embedding == count.head == 128256 * 4096


def test_tied_embeddings_are_counted_once():
    untied = count_parameters(spec_of("model=llama3_8b").model)
    tied = count_parameters(spec_of("model=llama3_8b", "model.tie_word_embeddings=true").model)
    assert untied.total - tied.total == untied.head
    assert tied.head == 0


def test_head_dim_apart_from_hidden_over_heads():
    model = spec_of("model=tiny", "model.head_dim=16").model
    assert count_parameters(model).attention == 2 * (2 * 32 * 4 * 16 + 2 * 32 * 2 * 16)


def test_an_open_shape_has_no_count():
    spec, _ = resolved("recipe=tiny", "data.mock=false")  # no data, so no vocabulary
    with pytest.raises(ValueError, match="vocab_size is open"):
        count_parameters(spec.model)
    with pytest.raises(ValueError, match="vocab_size is open"):
        step_flops(spec)


def test_batch_math():
    spec = spec_of("train.steps=10")
    assert (exact_quotient(8, 2), exact_quotient(8, 3)) == (4, None)
    assert tokens_per_step(spec) == 8 * 32
    assert samples_requested(spec) == 80
