from dataclasses import fields

import pytest
from made_specs import resolved

from megalaunch.config.errors import ConfigError
from megalaunch.config.explain import explain_key
from megalaunch.schema.moe import MoESpec
from megalaunch.schema.optimizer import OptimizerSpec


def test_one_key_a_section_and_an_unknown_key():
    spec, composition = resolved("recipe=quickstart", "train.steps=7")
    assert explain_key("train.steps", composition, spec).splitlines() == [
        "train.steps = 7 [steps]",
        "  Optimizer steps of the run.",
        "  from: command line",
        "  takes: an integer; default: none",
    ]
    assert "given as null and derived" in explain_key("batch.micro_batch_size", composition, spec)
    assert explain_key("optimizer", composition, spec).count("from: ") == len(fields(OptimizerSpec))
    with pytest.raises(ConfigError, match=r"did you mean 'train\.steps'"):
        explain_key("train.step", composition, spec)


def test_keys_of_nested_sections():
    spec, composition = resolved("recipe=llama3_8b", "model.moe.top_k=3")
    theta = explain_key("model.rope.theta", composition, spec)
    assert theta.startswith("model.rope.theta = 500000.0\n")
    assert "from: model=llama3_8b, conf/model/llama3_8b.yaml:" in theta
    moe = explain_key("model.moe", composition, spec)
    assert moe.count("from: ") == len(fields(MoESpec))
    assert "model.moe.top_k = 3\n" in moe
    assert explain_key("model", composition, spec).count("from: ") > len(fields(MoESpec)) + len(fields(OptimizerSpec))
    for key, meant in (("model.moe.topk", "model.moe.top_k"), ("rope.theta", "model.rope.theta")):
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            explain_key(key, composition, spec)
