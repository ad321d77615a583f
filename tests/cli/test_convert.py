"""`megalaunch convert` on small folders: what it carries, what it proves, and what it refuses whole."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import tiny_tokenizer
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.mapped_weights import parameter_shapes
from megalaunch.engine.checkpoint.store import save_checkpoint
from megalaunch.engine.weight_maps.weights import get_family_weights
from megalaunch.importers.huggingface.registry import from_hf_config, to_hf_config
from megalaunch.rundir.checkpoint.contents import WEIGHTS
from megalaunch.schema.spec_file import spec_to_text

from tiny_run import tiny_spec  # isort: skip

SPEC = tiny_spec(family="qwen2", qkv_bias=True, tie_word_embeddings=True, vocab_size=301)


def convert(*arguments: object):
    return CliRunner().invoke(app, ["convert", *(str(argument) for argument in arguments)])


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder as others make it: weights, config, tokenizer, generation config."""
    path = tmp_path / "hf"
    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for pair in get_family_weights(SPEC.model).tensors(SPEC.model):
        for name, shape in pair.shapes_of_theirs(parameter_shapes(SPEC.model)).items():
            tensors[name] = torch.randn(shape, generator=generator).mul(0.2).to(torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    config = {**to_hf_config(SPEC.model), "eos_token_id": 7}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    tiny_tokenizer(tmp_path)[1].rename(path / "tokenizer.json")
    return path


def test_there_and_back_is_the_same_bytes(folder, tmp_path):
    imported = convert("import", folder, "--output", tmp_path / "ckpt")
    assert imported.exit_code == 0, imported.output
    assert ": logits of 2 x 24 random tokens" in imported.output  # "verified" where transformers is installed
    exported = convert("export", tmp_path / "ckpt", "--output", tmp_path / "out", "--max-shard-size", "20KB")
    assert exported.exit_code == 0, exported.output
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    before, after = load_file(folder / "model.safetensors"), {}
    for name in set(index["weight_map"].values()):
        assert (tmp_path / "out" / name).stat().st_size < 40_000
        after |= load_file(tmp_path / "out" / name)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    for name in ("generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 7
    assert config["pad_token_id"] is None, "transformers would give its row no gradient"
    assert config["torch_dtype"] == "bfloat16"
    assert from_hf_config(config, "tiny") == from_hf_config(json.loads((folder / "config.json").read_text()), "tiny")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_the_umask_alone_decides_who_reads_an_export(folder, tmp_path, umask):
    assert convert("import", folder, "--output", tmp_path / "ckpt").exit_code == 0
    before = os.umask(umask)
    try:
        exported = convert("export", tmp_path / "ckpt", "--output", tmp_path / "out", "--max-shard-size", "20KB")
    finally:
        os.umask(before)
    assert exported.exit_code == 0, exported.output
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert {name.rpartition(".")[2] for name in modes} >= {"safetensors", "json"}
    assert set(modes.values()) == {0o666 & ~umask}, modes
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


def test_an_import_is_inspected_like_a_checkpoint_of_a_run(folder, tmp_path):
    assert convert("import", folder, "--output", tmp_path / "ckpt").exit_code == 0
    shown, listed = (CliRunner().invoke(app, ["checkpoint", name, f"{tmp_path}/ckpt"]) for name in ("inspect", "list"))
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path}/ckpt: complete, saved 20")
    assert lines[1] == "  step     none: converted weights, without optimizer and progress"
    assert lines[3] == "  layout   whole tensors; loads under any layout"
    assert lines[-1].split()[:2] == ["model", str(len(load_file(folder / "model.safetensors")))]
    assert (listed.exit_code, listed.stderr) == (
        2,
        f"error: {tmp_path}/ckpt is a checkpoint, not a run: megalaunch checkpoint inspect {tmp_path}/ckpt\n",
    )


def test_text_comes_out_of_an_import(folder, tmp_path):
    assert convert("import", folder, "--output", tmp_path / "ckpt").exit_code == 0
    arguments = ["--prompt", "the cat", "--max-new-tokens", "9", "--temperature", "0"]
    results = [CliRunner().invoke(app, ["generate", str(source), *arguments]) for source in (tmp_path / "ckpt", folder)]
    assert [result.exit_code for result in results] == [0, 0], results[-1].output
    assert results[0].stdout.startswith("the cat")
    assert results[0].stdout == results[1].stdout
    assert "config.json is read by megalaunch alone, not verified against transformers" in results[1].stderr
    assert "not verified" not in results[0].stderr


def test_every_fault_is_listed_and_nothing_written(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
    tensors["model.layers.9.extra"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 4
    for text in (
        "missing: model.norm.weight [32]",
        "wrong shape: model.layers.0.mlp.up_proj.weight is [3, 4], config.json expects [48, 32]",
        "unexpected: model.layers.9.extra [1]",
    ):
        assert text in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ({"a_new_kind_of_norm": True}, "a_new_kind_of_norm (True) is unknown"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "RoPE scaling 'longrope' is not supported",
        ),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
    ],
)
def test_a_config_that_means_something_else_is_refused(folder, tmp_path, changes, text):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 4
    assert text in result.output
    assert not (tmp_path / "ckpt").exists()


def test_other_formats_are_refused_by_name(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(quantised))
    assert "the weights are quantised (gptq, 4 bits)" in convert("import", folder, "--output", tmp_path / "x").output
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    for arguments in (("convert", "import", str(folder), "--output", "x"), ("generate", str(folder), "--prompt", "a")):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 4
        assert "is a LoRA adapter of meta-llama/Llama-3.2-1B" in result.output
    (folder / "adapter_config.json").rename(folder / "model.Q4_K_M.gguf")
    for source in (folder, folder / "model.Q4_K_M.gguf"):
        for arguments in (
            ("convert", "import", str(source), "--output", "x"),
            ("evaluate", str(source), "--data", "a"),
        ):
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code != 0
            assert "is GGUF, quantised for llama.cpp" in result.output


def test_pickles_are_refused(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 4
    assert "pytorch_model.bin" in result.output
    assert "save_pretrained" in result.output


def test_a_wrong_carry_fails_the_proof(folder, tmp_path, monkeypatch):
    from megalaunch.engine.checkpoint import convert as module

    real = module.verify_logits

    def wrong(model, path, of_folder, of_checkpoint, coarse=0.0):
        return real(model, path, of_folder, lambda *name: of_checkpoint(*name) * 1.01, coarse)

    monkeypatch.setattr(module, "verify_logits", wrong)
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 4
    assert "the models differ" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_misread_config_fails_the_proof(folder, tmp_path, monkeypatch):
    """Both sides would be read alike by us: only transformers sees it."""
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    from megalaunch.importers.huggingface import qwen2

    read = qwen2.read_rope
    monkeypatch.setattr(qwen2, "read_rope", lambda file: {**read(file), "theta": 500.0})
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 4
    assert "reads this config.json differently" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_without_transformers_nothing_is_proved(folder, tmp_path, monkeypatch):
    from megalaunch.engine.checkpoint import verify_config

    monkeypatch.setattr(verify_config, "find_spec", lambda name: None)
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 0, result.output
    assert "not verified: transformers is not installed" in result.output
    assert "compared: logits of 2 x 24 random tokens" in result.output
    assert "\nverified: " not in f"\n{result.output}"
    assert json.loads((tmp_path / "ckpt" / "proof.json").read_text())["verified"] is False


def test_ignored_keys_are_noted(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "use_mrope": False, "unsloth_fixed": True}))
    result = convert("import", folder, "--output", tmp_path / "ckpt")
    assert result.exit_code == 0, result.output
    assert "note: config.json: use_mrope (False) is ignored: positions have one dimension" in result.output
    assert "unsloth_fixed (True) is ignored" in result.output


def test_an_export_is_refused_by_the_key_that_no_family_has(tmp_path):
    spec = tiny_spec(attention_output_gate=True, vocab_size=301)
    (tmp_path / "spec.yaml").write_text(spec_to_text(spec))
    tensors = {WEIGHTS + name: torch.zeros(shape) for name, shape in parameter_shapes(spec.model).items()}
    assert any("gate_proj" in name and "attention" in name for name in tensors)
    origin = {"vocab_size": 301, "config": None}
    save_checkpoint(tmp_path / "ckpt", tensors, {"origin": origin}, {"spec.yaml": tmp_path / "spec.yaml"})
    refused = convert("export", tmp_path / "ckpt", "--output", tmp_path / "out")
    assert refused.exit_code == 4
    assert "family llama cannot express model.attention_output_gate=True (not False)" in " ".join(
        refused.output.split()
    )
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked(folder, tmp_path):
    assert convert("export", folder, "--output", tmp_path / "x", "--dtype", "int4").exit_code == 2
    assert convert("export", folder, "--output", tmp_path / "x", "--max-shard-size", "0GB").exit_code == 2
    assert convert("import", folder, "--output", folder).exit_code == 4


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["import", "nope", "--output", "x"], 4, "nope is not a directory: name a Hugging Face folder"),
        (["import", ".", "--output", "x"], 4, ". has no config.json: name a Hugging Face folder"),
        (["export", "nope", "--output", "x"], 2, "nope is not a directory: name a run directory"),
        (
            ["import-megatron", "nope", "--output", "x", "--allow-pickle"],
            4,
            "nope is not a directory: name a torch_dist",
        ),
    ],
)
def test_a_folder_that_is_not_there_is_refused_before_torch_is_imported(tmp_path, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "megalaunch.engine.api", None)  # importing it raises ImportError
    result = CliRunner().invoke(app, ["convert", *arguments])
    assert (result.exit_code, said in result.stderr) == (code, True), result.output
