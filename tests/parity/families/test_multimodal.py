"""The text decoder of a model of text and images, held to transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_variants import MULTIMODAL, VOCABULARY, load, make_multimodal
from published_configs import NO_SHAPE
from safetensors.torch import load_file, save_file
from tiny_run import tiny_tokenizer
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.verify_config import describe_verification, verify_config
from megalaunch.engine.inference.generate import GenerationConfig, generate_tokens
from megalaunch.engine.inference.load_model import open_model
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.model.build import build_decoder
from megalaunch.importers.huggingface import gemma3
from megalaunch.importers.huggingface.registry import FamilyError, from_hf_config

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

# Not 0, which pads unless config.json says otherwise: transformers gives its row of the embedding no gradient.
TOKENS = torch.randint(1, VOCABULARY - 3, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("multimodal") / "hf"
    return folder, make_multimodal(folder)


def decoder_of(weights: HuggingFaceWeights):
    decoder = build_decoder(weights.model)
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(weights.read(name))
    return decoder


def renamed(folder: Path, other: Path, change) -> Path:
    """The same folder with other tensors."""
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(change(load_file(folder / "model.safetensors")), other / "model.safetensors", {"format": "pt"})
    return other


def newer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the modules of transformers 5 are called."""
    text = "language_model.model."
    return {
        f"model.language_model.{name.removeprefix(text)}" if name.startswith(text) else f"model.{name}": tensor
        for name, tensor in tensors.items()
    }


def test_logits_and_every_gradient_are_those_of_the_whole_model(saved):
    folder, theirs = saved
    weights = HuggingFaceWeights(HuggingFaceFolder(folder))
    ours = decoder_of(weights)
    theirs.zero_grad()
    logits, expected = ours(TOKENS), theirs(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for made in (logits, expected):
        F.cross_entropy(made[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    gradients = {key.replace("model.language_model.", "model."): p.grad for key, p in theirs.named_parameters()}
    mine = {key: p.grad for key, p in ours.named_parameters()}
    for pair in weights.pairs:
        (key,), (expected_one,) = pair.ours, pair.to_ours([gradients[name] for name in pair.theirs])
        assert (mine.pop(key) - expected_one).abs().max() <= 1e-4 * expected_one.abs().max(), key
    assert not mine


def test_it_is_imported_with_notes_and_exported_as_a_model_of_text(saved, tmp_path):
    folder, theirs = saved
    report = import_huggingface(folder, tmp_path / "ckpt")
    assert report["verified"]
    assert report["reader_of_the_folder"].startswith("transformers")
    assert [note.split(" (")[0] for note in report["notes"]] == [
        *("config.json: vision_config", "config.json: mm_tokens_per_image", "config.json: boi_token_index"),
        *("config.json: eoi_token_index", "config.json: image_token_index", "23 tensors of the image encoder"),
    ]
    export_huggingface(tmp_path / "ckpt", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert written["eos_token_id"] == [1, 6], "that of the original file"
    again, info = load(tmp_path / "out")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(TOKENS).logits, theirs(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_both_layouts_of_names_hold_the_same_decoder(saved, tmp_path):
    folder, _ = saved
    old = HuggingFaceWeights(HuggingFaceFolder(folder))
    new = HuggingFaceWeights(HuggingFaceFolder(renamed(folder, tmp_path / "new", newer)))
    assert "language_model.model.norm.weight" in HuggingFaceFolder(folder).tensors
    assert all(torch.equal(old.read(name), new.read(name)) for name in old.shapes)
    assert new.notes == [*old.notes[:-1], old.notes[-1].replace("(multi", "(model.multi")]


@pytest.mark.parametrize("change", [dict, newer], ids=["published", "newer"])
def test_a_tied_head_may_be_there_and_nothing_else(saved, tmp_path, change):
    folder, _ = saved
    named = {dict: "language_model.lm_head.weight", newer: "lm_head.weight"}[change]

    def with_head(factor: float):
        def make(tensors):
            (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
            return change(tensors) | {named: embedding * factor}

        return make

    HuggingFaceWeights(HuggingFaceFolder(renamed(folder, tmp_path / "same", with_head(1))))
    with pytest.raises(
        CheckpointError, match=f"{named} differs from .*embed_tokens.weight, but the model has one parameter for both"
    ):
        HuggingFaceWeights(HuggingFaceFolder(renamed(folder, tmp_path / "other", with_head(2))))


def test_missing_and_unexpected_tensors_have_the_names_of_the_folder(saved, tmp_path):
    def change(tensors):
        tensors["audio_tower.weight"] = tensors.pop("language_model.model.norm.weight")
        return tensors

    with pytest.raises(CheckpointError) as refused:
        HuggingFaceWeights(HuggingFaceFolder(renamed(saved[0], tmp_path / "changed", change)))
    assert "missing: language_model.model.norm.weight [32]" in str(refused.value)
    assert "unexpected: audio_tower.weight [32]" in str(refused.value)


def test_keys_that_are_left_out_are_those_of_transformers():
    theirs = transformers.Gemma3Config().text_config.to_dict()
    assert {key: theirs[key] for key in gemma3.FAMILY.defaults} == gemma3.FAMILY.defaults
    model = from_hf_config({"model_type": "gemma3"}, "defaults")
    assert (model.num_layers, model.hidden_size, model.num_query_groups, model.head_dim) == (26, 2304, 4, 256)
    assert (model.sliding_window, model.max_position_embeddings, model.vocab_size) == (4096, 131072, 262208)
    assert from_hf_config({"model_type": "gemma3", "text_config": None}, "defaults") == model
    assert from_hf_config({"model_type": "gemma3_text"}, "defaults") == model


def config_of(**changes: Any) -> dict[str, Any]:
    return {**MULTIMODAL, **changes}


@pytest.mark.parametrize(
    ("top", "inner", "tied"), [(False, True, False), (True, False, True)], ids=["head of its own", "tied"]
)
def test_the_head_is_tied_where_the_whole_model_says_so(top, inner, tied):
    config = config_of(tie_word_embeddings=top, text_config={**MULTIMODAL["text_config"], "tie_word_embeddings": inner})
    assert from_hf_config(config, "head").tie_word_embeddings is tied
    assert verify_config(config).agrees


@pytest.mark.parametrize(
    "inner",
    [
        {"rope_scaling": None},
        {"rope_theta": 5000.0, "rope_local_base_freq": 500.0, "sliding_window_pattern": 3},
        {
            "rope_scaling": None,
            "rope_theta": 1000000,
            "rope_local_base_freq": 10000,
            "rope_parameters": {
                "full_attention": {"factor": 8.0, "rope_type": "linear"},
                "sliding_attention": {"rope_type": "default"},
            },
        },
    ],
    ids=["no scaling", "bases and pattern", "both"],
)
def test_rotation_and_windows_are_read_as_transformers_reads_them(inner):
    config = config_of(text_config={**MULTIMODAL["text_config"], **inner})
    verification = verify_config(config)
    assert verification.agrees, verification


def test_a_misread_key_is_seen(monkeypatch):
    """One that is left out, and one that is there: the factor of the layers without a window."""
    with monkeypatch.context() as patch:
        patch.setitem(gemma3.FAMILY.defaults, "head_dim", 128)
        message = r"q_proj.weight is \[1024, \d+\] in transformers and \[512, \d+\] here"
        with pytest.raises(CheckpointError, match=message):
            verify_config(MULTIMODAL)
    read = gemma3.scaling_values
    monkeypatch.setattr(gemma3, "scaling_values", lambda file, given: {**read(file, given), "factor": 4.0})
    verification = verify_config(MULTIMODAL)
    assert verification.reader is not None
    assert not verification.agrees


def each_null_or_missing(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in config.keys() - NO_SHAPE:
        yield {**config, key: None}
        yield {other: value for other, value in config.items() if other != key}


@pytest.mark.slow
@pytest.mark.release  # of the text decoder test_published_configs.py tries each key
def test_no_key_that_is_null_or_missing_is_misread():
    """Each key in turn: transformers and we agree, or one of us refuses the file."""
    config = json.loads(transformers.Gemma3Config.from_dict(MULTIMODAL).to_json_string(use_diff=False))
    inner = ({**config, "text_config": text} for text in each_null_or_missing(config["text_config"]))
    for changed in (*inner, *each_null_or_missing(config)):
        try:
            verification = verify_config(changed)
        except FamilyError:
            continue
        assert verification.agrees or verification.reader is None, (changed, verification)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"text_config": [1]}, r"text_config is \[1\], must be an object or null"),
        ({"text_config": {"model_type": "llama"}}, "text_config has model_type 'llama', not 'gemma3_text'"),
        ({"text_config": {"unheard_of": 3}}, r"unheard_of \(3\) is unknown"),
        ({"audio_config": {"hidden_size": 8}}, "audio_config .* is unknown"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq, 4 bits\)"),
        ({"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention is not supported"),
    ],
)
def test_what_may_change_the_decoder_is_refused(changes, problem):
    with pytest.raises(FamilyError, match=problem):
        from_hf_config(config_of(**changes), "changed")


def test_a_run_says_that_the_text_decoder_is_read_alone(saved, monkeypatch):
    from megalaunch.engine.checkpoint import verify_config

    monkeypatch.setattr(verify_config, "find_spec", lambda name: None)
    assert str(describe_verification(saved[0])).endswith("only its text decoder is read")


def test_generate_and_evaluate_read_the_folder_as_it_is(tmp_path):
    theirs = make_multimodal(tmp_path / "hf", vocab_size=300)
    tokenizer, path = tiny_tokenizer(tmp_path)
    path.rename(tmp_path / "hf" / "tokenizer.json")
    model = open_model(tmp_path / "hf", device=torch.device("cpu"))
    assert {1, 6} <= model.eos_token_ids, "eos_token_id stands beside text_config"
    prompt = tokenizer.encode("the quick")
    drawn = generate_tokens(model.decoder, [prompt], GenerationConfig(24, Sampling(temperature=0)))
    theirs.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    written = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    assert [int(step.tokens_B) for step in drawn] == written[0, len(prompt) :].tolist()
    text = "the quick brown fox " * 30
    (tmp_path / "text.txt").write_text(text)
    for arguments in (
        ("generate", tmp_path / "hf", "--prompt", "the", "--max-new-tokens", "2"),
        ("evaluate", tmp_path / "hf", "--data", tmp_path / "text.txt", "--sequence-length", "20"),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        assert "only its text decoder is read" in result.stderr
