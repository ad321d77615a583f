"""config.json as it stands on hubs: read, and read as transformers reads it; and every key that may be misread."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from family_variants import VARIANTS
from published_configs import NO_SHAPE, published_configs
from slow_cases import slow_but

from megalaunch.engine.checkpoint.verify_config import shrink_config, verify_config
from megalaunch.importers.huggingface.ignored_keys import ignore_reason
from megalaunch.importers.huggingface.registry import FamilyError, differences, from_hf_config, to_hf_config

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

PUBLISHED = published_configs()
# Its rotary scaling has a name that transformers itself no longer knows.
NAMELESS = "microsoft/Phi-3-mini-128k-instruct as first published"
# One of each way to read: the others are compared with --all.
QUICK = (
    *("gpt2-medium", "rinna/japanese-gpt2-medium", "lmsys/vicuna-7b-v1.5-16k", "NousResearch/Yarn-Llama-2-7b-64k"),
    *("unsloth/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-0.5B"),
    *("Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM3-3B", "princeton-nlp/gemma-2-9b-it-SimPO without caps"),
    *("google/gemma-3-270m", "google/gemma-3-27b-it"),
    *("microsoft/Phi-3-mini-4k-instruct", "microsoft/Phi-4-mini-instruct"),
    *("mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3"),
    *("allenai/OLMo-2-0425-1B", "EleutherAI/gpt-neox-20b", "togethercomputer/RedPajama-INCITE-Base-3B-v1"),
)


def config_of(variant: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a small model, with every key that transformers writes."""
    kind, values = VARIANTS[variant]
    config = getattr(transformers, kind)(**values)
    return {**json.loads(config.to_json_string(use_diff=False)), **changes}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_there_are_some_sixty_and_every_family():
    assert len(PUBLISHED) >= 60
    assert len({config["model_type"] for config in PUBLISHED.values()}) == 19


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_and_written(name):
    model = from_hf_config(PUBLISHED[name], name)
    assert from_hf_config(to_hf_config(model), name) == model


@pytest.mark.parametrize("name", ["NousResearch/Yarn-Llama-2-7b-64k", "unsloth/Llama-3.2-1B-Instruct"])
def test_a_model_of_pretraining_is_written_without_the_scaling_that_comes_later(name):
    """Recipes of pre-training set rope.scaling=none alone; the values that only the scaling reads stay."""
    model = from_hf_config(PUBLISHED[name], name)
    unscaled = replace(model, rope=replace(model.rope, scaling="none"))
    assert to_hf_config(unscaled)["rope_scaling"] is None
    assert from_hf_config(to_hf_config(unscaled), name).rope.factor == 1
    changed = differences(model, replace(model, rope=replace(model.rope, factor=3.0)))
    assert f"model.rope.factor={model.rope.factor} (not 3.0)" in changed, "the scaling reads it"


def test_a_key_that_changes_nothing_is_noted_and_one_that_might_is_refused():
    notes: list[str] = []
    from_hf_config(PUBLISHED["HuggingFaceTB/SmolLM2-135M"], "smol", notes)
    assert [note.split(" is ignored: ")[0] for note in notes] == [
        "config.json: is_llama_config (True)",
        "config.json: rope_interleaved (False)",
    ]
    from_hf_config({**PUBLISHED["Qwen/Qwen3-0.6B"], "_model_name_or_path": "Qwen3 0.6B"}, "from a GGUF file")
    for key, value in (("use_mrope", True), ("rope_interleaved", 1), ("qkv_bias", True), ("embd_pdrop", 0.1)):
        assert ignore_reason(key, value) is None
        with pytest.raises(FamilyError, match=f"{key} .* is unknown"):
            from_hf_config({**PUBLISHED["Qwen/Qwen3-0.6B"], key: value}, "changed")


@pytest.mark.parametrize("name", slow_but(QUICK, *QUICK[::3]))
def test_it_is_read_as_transformers_reads_it(name):
    verification = verify_config(PUBLISHED[name])
    assert verification.agrees, verification


@pytest.mark.parametrize("name", slow_but([name for name in PUBLISHED if name not in QUICK], one_in=2))
def test_each_other_is_read_as_transformers_reads_it(name):
    verification = verify_config(PUBLISHED[name])
    assert verification.agrees or (name == NAMELESS and verification.reader is None), verification


def test_the_older_name_of_longrope():
    old = from_hf_config(PUBLISHED[NAMELESS], "same")
    renamed = {**PUBLISHED[NAMELESS]["rope_scaling"], "type": "longrope"}
    assert from_hf_config({**PUBLISHED[NAMELESS], "rope_scaling": renamed}, "same") == old


# What is read otherwise than transformers reads it was silent once: same, or refused with this.
AWKWARD: dict[str, tuple[dict[str, Any], str | None]] = {
    "gemma2 null attention cap": (config_of("gemma2", attn_logit_softcapping=None), None),
    "gemma2 null logit cap": (config_of("gemma2", final_logit_softcapping=None), None),
    "gemma3 attention cap": (config_of("gemma3", attn_logit_softcapping=2.0), None),
    "gemma3 logit cap": (config_of("gemma3", final_logit_softcapping=2.0), None),
    "gemma2 null window": (config_of("gemma2", sliding_window=None, layer_types=None), "sliding_window is null"),
    "llama partial": (config_of("llama 1", partial_rotary_factor=0.5), None),
    "llama partial inside": (
        config_of("llama 1", rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}),
        None,
    ),
    "llama partial and linear": (
        config_of(
            "llama 1",
            rope_parameters={
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 1e3,
                "partial_rotary_factor": 0.5,
            },
        ),
        "partial_rotary_factor 0.5 with RoPE scaling",
    ),
    "yarn attention factor at factor 1": (
        config_of(
            "llama 1",
            rope_parameters={"rope_type": "yarn", "factor": 1.0, "rope_theta": 1e3, "attention_factor": 1.7},
        ),
        None,
    ),
    "yarn attention factor below 1": (
        config_of(
            "llama 1",
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "attention_factor": 0.6},
        ),
        None,
    ),
    "yarn without a factor": (
        config_of(
            "llama 1",
            rope_parameters={
                "rope_type": "yarn",
                "factor": None,
                "rope_theta": 1e3,
                "original_max_position_embeddings": 16,
            },
        ),
        None,
    ),
    "yarn with a beta of 0": (
        config_of(
            "llama 1",
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e3, "beta_fast": 0, "beta_slow": 0},
        ),
        None,
    ),
    "llama3 without its context": (
        config_of(
            "llama 1",
            rope_parameters={
                "rope_type": "llama3",
                "factor": 4.0,
                "rope_theta": 1e3,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        None,
    ),
    "linear without a factor": (
        config_of("llama 1", rope_parameters={"rope_type": "linear", "rope_theta": 1e3}),
        "linear has no factor",
    ),
    "mistral without a window": (
        {key: value for key, value in config_of("mistral").items() if key != "sliding_window"},
        None,
    ),
    "qwen2 windows without a width": (
        {
            key: value
            for key, value in config_of("qwen2 windows").items()
            if key not in ("sliding_window", "layer_types")
        },
        None,
    ),
    "smollm3 windows": (
        config_of("smollm3", use_sliding_window=True, sliding_window=5, layer_types=None),
        "sliding windows in NoPE layers only",
    ),
    "gpt2 with cross attention": (config_of("gpt2", add_cross_attention=True), "add_cross_attention (True) is unknown"),
    "gpt2 dropout of null": (config_of("gpt2", resid_pdrop=None), None),
    "pythia without a vocabulary": (config_of("pythia", vocab_size=None), "vocab_size is null"),
    "a flag that is a number": (config_of("llama 1", attention_bias=2), "must be true or false"),
    "layer types of other layers": (config_of("gemma3", num_hidden_layers=6), "layer_types has 7 layers"),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_an_awkward_key_is_read_as_transformers_reads_it_or_refused(name):
    config, problem = AWKWARD[name]
    if problem is not None:
        with pytest.raises(FamilyError, match=problem.replace("(", r"\(").replace(")", r"\)")):
            from_hf_config(config, name)
        return
    verification = verify_config(config)
    assert verification.agrees or (verification.reader is None and "rejects" in verification.reason), verification


@pytest.mark.parametrize("variant", slow_but(VARIANTS, one_in=2))
def test_no_key_that_is_null_or_missing_is_misread(variant):
    """Each key in turn: transformers and we agree, or one of us refuses the file."""
    base = config_of(variant)
    for key in base.keys() - NO_SHAPE:
        for config in ({**base, key: None}, {other: value for other, value in base.items() if other != key}):
            try:
                verification = verify_config(config)
            except FamilyError:
                continue
            assert verification.agrees or verification.reader is None, (key, config.get(key, "missing"), verification)


def test_a_misread_config_is_seen_at_any_size(monkeypatch):
    """The fault that was silent from 250 million parameters on: null taken for the default."""
    from megalaunch.importers.huggingface import hf_config

    real = hf_config.ConfigFile.number

    def number(self, key, default=hf_config._MISSING, null=hf_config._MISSING):
        return real(self, key, default, default if key == "attn_logit_softcapping" else null)

    config = PUBLISHED["princeton-nlp/gemma-2-9b-it-SimPO without caps"]
    monkeypatch.setattr(hf_config.ConfigFile, "number", number)
    verification = verify_config(config)
    assert verification.reader is not None
    assert not verification.agrees


def test_only_sizes_are_cut():
    config = PUBLISHED["google/gemma-2-27b-it"]
    small = shrink_config(config)
    assert {key for key in config if small[key] != config[key]} == {
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("vocab_size", "pad_token_id", "sliding_window"),
    }
    assert small["num_attention_heads"] / small["num_key_value_heads"] == 2
