from dataclasses import fields

import pytest
from made_specs import resolved

from megalaunch.config.errors import ConfigError
from megalaunch.config.explain import explain_key
from megalaunch.config.schema.optimizer import OptimizerSpec


def test_one_key_a_section_and_an_unknown_key():
    spec, composition = resolved("recipe=quickstart", "train.steps=7")
    assert explain_key("train.steps", composition, spec).splitlines() == [
        "train.steps = 7 [steps]",
        "  Optimizer steps of the whole run.",
        "  from: command line",
        "  takes: a whole number; default: none",
    ]
    assert "given as null and derived" in explain_key("batch.micro_batch_size", composition, spec)
    assert explain_key("optimizer", composition, spec).count("from: ") == len(fields(OptimizerSpec))
    with pytest.raises(ConfigError, match=r"did you mean 'train\.steps'"):
        explain_key("train.step", composition, spec)
