"""FLOPs and parameters against figures that others published or computed."""

import pytest
from made_specs import resolved

from megalaunch.plan.batch import own_share, samples_requested, tokens_per_step
from megalaunch.plan.flops import flops_per_token, step_flops
from megalaunch.plan.parameters import count_parameters


def spec_of(*words):
    return resolved("recipe=tiny", "data.corpus=x", *words)[0]


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


def test_parameters_of_llama3_8b_are_the_published_ones():
    count = count_parameters(spec_of("model=llama3_8b").model)
    assert count.total == 8_030_261_248
    assert count.embedding == count.head == 128256 * 4096


def test_tied_embeddings_are_counted_once():
    untied = count_parameters(spec_of("model=llama3_8b").model)
    tied = count_parameters(spec_of("model=llama3_8b", "model.tied_embeddings=true").model)
    assert untied.total - tied.total == untied.head
    assert tied.head == 0


def test_head_dim_apart_from_hidden_over_heads():
    model = spec_of("model=tiny", "model.head_dim=16").model
    assert count_parameters(model).attention == 2 * (2 * 32 * 4 * 16 + 2 * 32 * 2 * 16)


def test_an_open_shape_has_no_count():
    spec, _ = resolved("recipe=tiny")  # no data, so no vocabulary
    with pytest.raises(ValueError, match="vocab_size is open"):
        count_parameters(spec.model)
    with pytest.raises(ValueError, match="vocab_size is open"):
        step_flops(spec)


def test_batch_math():
    spec = spec_of("train.steps=10")
    assert (own_share(8, 2), own_share(8, 3)) == (4, None)
    assert tokens_per_step(spec) == 8 * 32
    assert samples_requested(spec) == 80
