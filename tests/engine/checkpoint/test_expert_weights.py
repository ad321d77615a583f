"""Experts in files: read as one tensor per expert or per layer, and exported one expert at a time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from family_variants import make
from safetensors.torch import load_file, save_file

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "hf"
    make("mixtral", folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(mixtral) -> Path:
    import_huggingface(mixtral, mixtral.parent / "ckpt")
    return mixtral.parent / "ckpt"


def copy_with(folder: Path, target: Path, tensors: dict[str, torch.Tensor]) -> HuggingFaceFolder:
    target.mkdir()
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return HuggingFaceFolder(target)


def test_experts_fused_per_layer_give_the_same_parameters(mixtral, tmp_path):
    tensors = load_file(mixtral / WEIGHTS)
    fused = {name.replace("block_sparse_moe", "mlp"): value for name, value in tensors.items() if "experts" not in name}
    for layer in range(2):
        block = f"model.layers.{layer}.block_sparse_moe.experts."
        gate, down, up = (torch.stack([tensors[f"{block}{e}.w{n}.weight"] for e in range(5)]) for n in (1, 2, 3))
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    published = HuggingFaceWeights(HuggingFaceFolder(mixtral))
    again = HuggingFaceWeights(copy_with(mixtral, tmp_path / "fused", fused))
    assert published.shapes.keys() == again.shapes.keys()
    assert all(torch.equal(published.read(name), again.read(name)) for name in published.shapes)
    assert_experts_by_themselves(published)
    assert_experts_by_themselves(again)


def assert_experts_by_themselves(weights: StoredWeights | HuggingFaceWeights) -> None:
    """Each expert that is read alone is the one of all."""
    stacks = [name for name in weights.shapes if ".mlp.experts." in name]
    assert stacks
    for name in stacks:
        whole = weights.read(name)
        assert all(torch.equal(weights.read(name, expert), whole[expert]) for expert in range(len(whole))), name


def test_an_export_reads_one_expert_at_a_time(mixtral, checkpoint, tmp_path, monkeypatch):
    whole: list[str] = []
    read = StoredWeights.read

    def watched(self: StoredWeights, name: str, row: int | None = None) -> torch.Tensor:
        if row is None:
            whole.append(name)
        return read(self, name, row)

    assert_experts_by_themselves(StoredWeights(checkpoint))
    monkeypatch.setattr(StoredWeights, "read", watched)
    monkeypatch.setattr("megalaunch.engine.checkpoint.convert.verify_logits", lambda *_: {})
    export_huggingface(checkpoint, tmp_path / "out")
    assert whole
    assert not [name for name in whole if ".experts." in name]
    first, second = load_file(mixtral / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_experts_of_several_dtypes_are_refused(mixtral, tmp_path):
    tensors = load_file(mixtral / WEIGHTS)
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    tensors[name] = tensors[name].bfloat16()
    with pytest.raises(CheckpointError, match=r"experts.3.w1.weight is BF16, but .*experts.0.w1.weight is F32"):
        HuggingFaceWeights(copy_with(mixtral, tmp_path / "mixed", tensors))


def test_an_expert_too_few_is_named(mixtral, tmp_path):
    tensors = load_file(mixtral / WEIGHTS)
    del tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"]
    with pytest.raises(CheckpointError, match=r"missing: model.layers.1.block_sparse_moe.experts.4.w2.weight"):
        HuggingFaceWeights(copy_with(mixtral, tmp_path / "few", tensors))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Path:
    """DeepSeek-V3 whose config.json has a layer of multi-token prediction; transformers writes no such layer."""
    folder = tmp_path_factory.mktemp("deepseek") / "hf"
    make("deepseek v3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return folder


def with_mtp(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder and a layer of multi-token prediction, named as in published files."""
    tensors = load_file(folder / WEIGHTS)
    layer = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    added = {name.replace("layers.2", "layers.3"): value + 1 for name, value in layer.items()}
    width = tensors["model.norm.weight"].shape[0]
    added |= {f"model.layers.3.{name}.weight": torch.rand(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    added["model.layers.3.eh_proj.weight"] = torch.rand(width, 2 * width)
    added["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    added["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors | added


def test_layers_of_multi_token_prediction_are_read_and_written(deepseek, tmp_path):
    tensors = with_mtp(deepseek)
    folder = copy_with(deepseek, tmp_path / "mtp", tensors).directory
    import_huggingface(folder, tmp_path / "ckpt")
    stored = StoredWeights(tmp_path / "ckpt")
    assert torch.equal(stored.read("mtp.0.projection.weight"), tensors["model.layers.3.eh_proj.weight"])
    export_huggingface(tmp_path / "ckpt", tmp_path / "out")
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_copy_that_differs_is_refused(deepseek, tmp_path):
    tensors = with_mtp(deepseek)
    tensors["model.layers.3.shared_head.head.weight"] += 1
    message = "model.layers.3.shared_head.head.weight differs from lm_head.weight, but the model has one parameter"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        HuggingFaceWeights(copy_with(deepseek, tmp_path / "mtp", tensors))


def test_files_without_their_layers_of_multi_token_prediction_are_read_with_a_note(deepseek):
    weights = HuggingFaceWeights(HuggingFaceFolder(deepseek))
    assert weights.model.mtp.num_layers == 0
    assert "the files have no layers of multi-token prediction, though config.json does: left out" in weights.notes
