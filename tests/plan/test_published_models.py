"""Every model option against what its makers published: parameters in all, and those that a token meets."""

from __future__ import annotations

import pytest
from made_specs import resolved
from slow_cases import slow_but

from megalaunch.config.groups import option_names
from megalaunch.plan.parameters import count_parameters

EXACT = {
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1558m": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama31_405b": 405_853_388_800,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "mistral_7b": 7_241_732_096,
    "mistral_7b_v03": 7_248_023_552,
    "qwen25_0_5b": 494_032_768,
    "qwen25_1_5b": 1_543_714_304,
    "qwen25_3b": 3_085_938_688,
    "qwen25_7b": 7_615_616_512,
    "qwen25_14b": 14_770_033_664,
    "qwen25_32b": 32_763_876_352,
    "qwen25_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen15_moe_a2_7b": 14_315_784_192,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v2": 235_741_434_880,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "olmoe_7b": 6_919_161_856,
    "smollm3_3b": 3_075_098_624,
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "phi3_mini": 3_821_079_552,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "pythia_160m": 162_322_944,
    "pythia_1_4b": 1_414_647_808,
}
"""Of the published weights, tied matrices counted once."""


def model_of(option):
    return resolved("recipe=tiny", "data.corpus=x", f"model={option}")[0].model


@pytest.mark.parametrize(("option", "parameters"), slow_but(EXACT.items(), *[*EXACT.items()][::4]))
def test_parameters_are_those_of_the_published_weights(option, parameters):
    assert count_parameters(model_of(option)).total == parameters


ROUNDED = {
    "gpt3_125m": "125M",
    "gpt3_350m": "350M",
    "gpt3_760m": "760M",
    "gpt3_1_3b": "1.3B",
    "gpt3_2_7b": "2.7B",
    "gpt3_6_7b": "6.7B",
    "gpt3_13b": "13.0B",
    "gpt3_175b": "175B",
    "deepseek_v3": "671B",
    "moonlight_16b": "16B",
}
"""Models of which only a rounded size is published, without the further depths."""


def agrees(count, published):
    """Within half a percent, or the same digits after rounding or cutting: 2.45B is published as 2.4B."""
    digits, unit = float(published[:-1]), {"M": 1e6, "B": 1e9}[published[-1]]
    last = 10 ** -len(published[:-1].partition(".")[2])
    if digits >= 100 and published.endswith("0M"):  # 350M of 355.9M: the last 0 is no digit
        last = 10
    cut = count / unit // last * last
    rounded = (count / unit + last / 2) // last * last
    return abs(count / unit - digits) <= 0.005 * digits or min(abs(cut - digits), abs(rounded - digits)) < 1e-6 * digits


def test_agreement_is_no_more_than_rounding():
    assert agrees(2_451_435_008, "2.4B")
    assert agrees(21_375_800_320, "21B")
    assert agrees(355_871_744, "350M")
    assert not agrees(2_510_000_000, "2.4B")
    assert not agrees(22_000_000_000, "21B")
    assert not agrees(361e6, "350M")


@pytest.mark.parametrize(("option", "published"), slow_but(ROUNDED.items(), *[*ROUNDED.items()][::4]))
def test_parameters_agree_with_a_rounded_figure(option, published):
    assert agrees(count_parameters(model_of(option)).decoder, published)


ACTIVE = {
    ("mixtral_8x7b", "12.9B", "all"),
    ("mixtral_8x22b", "39B", "all"),
    ("qwen15_moe_a2_7b", "2.7B", "all"),
    ("qwen3_30b_a3b", "3.3B", "all"),
    ("qwen3_235b_a22b", "22B", "all"),
    ("olmoe_7b", "1.3B", "all"),
    ("deepseek_v2", "21B", "all"),
    ("deepseek_v2_lite", "2.4B", "input embedding left out"),
    ("deepseek_v3", "36.7B", "input embedding left out"),
    ("gpt_oss_20b", "3.61B", "input embedding left out"),
    ("gpt_oss_120b", "5.13B", "input embedding left out"),
    ("deepseek_v2_lite", "2.24B", "embedding and head left out"),  # the table in Moonlight's report
    ("moonlight_16b", "2.24B", "embedding and head left out"),
}
"""As published, and whether the input embedding and the head are in that figure."""


@pytest.mark.parametrize(("option", "published", "basis"), sorted(ACTIVE))
def test_active_parameters_agree_with_the_published_figure(option, published, basis):
    count = count_parameters(model_of(option))
    left_out = {"all": 0, "input embedding left out": count.embedding}.get(basis, count.embedding + count.head)
    assert agrees(count.active - left_out, published)


def test_the_further_depth_of_deepseek_v3():
    """README_WEIGHTS of DeepSeek-V3: 11.5B; with the projection of both streams, 0.1B more."""
    count = count_parameters(model_of("deepseek_v3"))
    assert count.mtp - 2 * 7168**2 == pytest.approx(11.5e9, rel=0.002)
    assert count.total == count.decoder + count.mtp


def test_every_option_is_in_a_table_or_is_our_own():
    published = set(EXACT) | set(ROUNDED)
    own = {name for name in option_names("model") if name not in published}
    assert {name for name in own if not name.endswith("tiny")} == {"quickstart"}
    assert {option for option, _, _ in ACTIVE} == {
        name for name in published if model_of(name).moe.num_experts is not None
    }
