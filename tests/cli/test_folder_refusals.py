"""What is wrong with a Hugging Face folder is said with the file and a way out, by every command that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint.convert import export_huggingface
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("folders")
    export_huggingface(make_run(place / "run", steps=(1,)).root, place / "hf", max_shard_bytes=60_000)
    return place / "hf"


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A folder of several files that a test may damage."""
    copy = tmp_path / "hf"
    copy.mkdir()
    for file in exported.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert len(list(copy.glob("*.safetensors"))) > 2
    return copy


def refused(*arguments: object, code: int = 4) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stderr


def both(folder: Path) -> list[str]:
    """What `convert import` and `generate` say."""
    output = folder.parent / "ckpt"
    found = [refused("convert", "import", folder, "--output", output), refused("generate", folder, "--prompt", "the")]
    assert not output.exists()
    return found


def test_all_files_that_the_index_names_and_the_folder_lacks_are_listed(folder: Path):
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in files[:2]:
        (folder / name).unlink()
    for said in both(folder):
        assert f"{folder} lacks {files[0]}, {files[1]} of model.safetensors.index.json" in said
        assert "copy or download them" in said


def test_a_file_that_is_cut_off(folder: Path):
    damaged = min(folder.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    for said in both(folder):
        assert f"{damaged}: bad safetensors header: the tensors end at byte" in said
        assert "copy or download it again" in said


def test_no_folder_at_all(tmp_path: Path):
    said = refused("convert", "import", tmp_path / "nowhere", "--output", tmp_path / "ckpt")
    assert f"{tmp_path / 'nowhere'} is not a directory" in said
    said = refused("convert", "import", tmp_path, "--output", tmp_path / "ckpt")
    assert f"{tmp_path} has no config.json: name a Hugging Face folder" in said
    said = refused("generate", tmp_path, "--prompt", "the", code=2)
    assert "or a Hugging Face folder (config.json and safetensors)" in said


def test_no_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    checkpoint = folder.parent / "ckpt"
    result = CliRunner().invoke(app, ["convert", "import", str(folder), "--output", str(checkpoint)])
    assert result.exit_code == 0, result.output
    assert "next:" not in result.stdout
    assert f"{folder} has no tokenizer: {checkpoint} can start a run but cannot generate text" in result.stdout
    for arguments in (["generate", folder, "--prompt", "the"], ["evaluate", folder, "--data", __file__]):
        said = refused(*arguments)
        assert f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json)" in said
        assert "copy the one that belongs to the model there" in said
    said = refused("generate", checkpoint, "--prompt", "the")
    assert f"{checkpoint} was imported without a tokenizer" in said
    assert "import the weights again from a folder that has one" in said


def test_a_tensor_of_no_layer(folder: Path):
    """Listed with its name and shape; nothing is written."""
    index = folder / "model.safetensors.index.json"
    save_file({"extra": torch.zeros(2)}, folder / "more.safetensors")
    data = json.loads(index.read_text())
    data["weight_map"]["extra"] = "more.safetensors"
    index.write_text(json.dumps(data))
    for said in both(folder):
        assert "unexpected: extra [2]" in said


@pytest.mark.parametrize("value", [[], None, "x", {"a": {"b": "c"}}, {"a": ["b"]}, {"a": None}, {}, {"a": "../b"}])
def test_an_index_that_names_no_files(folder: Path, value: object):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": value}))
    for said in both(folder):
        assert f"{index}: weight_map " in said
        assert "Traceback" not in said


WRONG = ([], {}, "x", None, True, -1, 0, 1.5, 1e308, 10**30, 10**12, {"a": [1]}, [[]])


def test_no_value_of_a_config_file_ends_in_a_traceback_or_spins(folder: Path):
    """Every key of a real file with values of other kinds and sizes: carried over or refused, nothing else."""
    config = json.loads((folder / "config.json").read_text())
    refused_keys = set()
    for key in [*config, "rope_scaling", "rope_parameters", "head_dim", "layer_types"]:
        for value in WRONG:
            (folder / "config.json").write_text(json.dumps({**config, key: value}))
            try:
                HuggingFaceWeights(HuggingFaceFolder(folder))
            except CheckpointError:
                refused_keys.add(key)
    assert {"num_hidden_layers", "hidden_size", "vocab_size", "rope_scaling", "model_type"} <= refused_keys
