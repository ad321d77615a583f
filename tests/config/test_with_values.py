"""Some leaves of a spec replaced: the same spec, or the same refusal, as building all of it again."""

from dataclasses import replace

import pytest
from made_specs import resolved

from megalaunch.schema import SpecError, build_run_spec, spec_to_dict, with_values
from megalaunch.schema.paths import put, with_value

SPEC = resolved("recipe=tiny")[0]


def built_again(values):
    data = spec_to_dict(SPEC)
    for path, value in values.items():
        put(data, path, value)
    return build_run_spec(data)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"parallel.tp": 2},
        {"optimizer.lr": 1, "model.moe.top_k": 3, "model.rope.theta": 5, "model.num_layers": 7},
        {"data.blend": ["a", "b"], "precision.fp8.recipe": "mxfp8"},
    ],
)
def test_what_is_replaced_is_typed_and_the_rest_stays(values):
    assert with_values(SPEC, values) == built_again(values)


@pytest.mark.parametrize(
    "values",
    [
        {"parallel.tp": 0},
        {"model.moe.top_k": True, "parallel.tp": "two"},
        {"model.hiden_size": 3},
        {"train.steps": "???"},
        {"precision.fp8.recipe": "mxfp9"},
    ],
)
def test_what_does_not_fit_is_refused_with_the_same_message(values):
    with pytest.raises(SpecError) as again:
        built_again(values)
    with pytest.raises(SpecError) as found:
        with_values(SPEC, values)
    assert str(found.value) == str(again.value)


def test_what_is_not_validated_is_replaced_in_a_copy():
    before = spec_to_dict(SPEC)
    found = with_value(SPEC, {"parallel.tp": "two", "model.moe.top_k": 3})
    assert found.parallel == replace(SPEC.parallel, tp="two")
    assert found.model.moe == replace(SPEC.model.moe, top_k=3)
    assert found.data is SPEC.data
    assert spec_to_dict(SPEC) == before
    with pytest.raises(TypeError, match="ModelSpec has no field hiden_size, layers"):
        with_value(SPEC, {"model.layers": 3, "model.hiden_size": 3})
