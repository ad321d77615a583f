"""Quantised folders: gpt-oss's mxfp4 and DeepSeek-V3's fp8 are read as bf16, to the bit as transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_variants import VARIANTS, make
from safetensors.torch import load_file, save_file

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.hf_weights import HuggingFaceWeights
from megalaunch.engine.checkpoint.huggingface import HuggingFaceFolder
from megalaunch.engine.checkpoint.quantized_weights import DequantizedFolder, dequantize_fp8, dequantize_mxfp4

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers (the extra `parity`) is missing")
EXPERTS, WIDTH, HIDDEN = 3, 64, 32


def packed(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of random values [E, rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 126, (EXPERTS, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def test_mxfp4_is_dequantised_as_in_transformers():
    blocks, scales = packed(24, 96, seed=1)
    assert torch.equal(dequantize_mxfp4(blocks, scales), mxfp4.convert_moe_packed_tensors(blocks, scales))


def test_fp8_is_scaled_by_blocks():
    value = torch.randn(20, 11, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    factors = torch.rand(3, 2, generator=torch.Generator().manual_seed(3)) + 0.5
    each = torch.kron(factors, torch.ones(8, 8))[:20, :11]
    assert torch.equal(dequantize_fp8(value, factors, 8, 8), (value.float() * each).bfloat16())


@pytest.fixture
def gpt_oss(tmp_path) -> Path:
    """A small gpt-oss in bf16 whose experts are quantised as published."""
    folder = tmp_path / "hf"
    changes = {"intermediate_size": WIDTH, "hidden_size": HIDDEN, "num_local_experts": EXPERTS}
    make("gpt oss", folder, **changes)
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    for layer in range(VARIANTS["gpt oss"][1]["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts."
        for seed, (name, rows, columns) in enumerate(
            (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH))
        ):
            del tensors[experts + name]
            blocks, scales = packed(rows, columns, 10 * layer + seed)
            tensors |= {f"{experts}{name}_blocks": blocks, f"{experts}{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_mxfp4_folder_is_imported_and_exported_as_bf16(gpt_oss, tmp_path):
    report = import_huggingface(gpt_oss, tmp_path / "ckpt")
    assert any("quantization_config" in note for note in report["notes"])
    assert report["reader_of_the_folder"] == "megalaunch"
    stored = load_file(gpt_oss / "model.safetensors")
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    expected = mxfp4.convert_moe_packed_tensors(stored[f"{gate_up}_blocks"], stored[f"{gate_up}_scales"])
    gate = StoredWeights(tmp_path / "ckpt").read("layers.1.mlp.experts.gate_proj.weight")
    assert torch.equal(gate, expected[..., ::2].mT)
    export_huggingface(tmp_path / "ckpt", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[gate_up], expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_blocks_without_scales_are_refused(gpt_oss, tmp_path):
    stored = load_file(gpt_oss / "model.safetensors")
    del stored["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(stored, gpt_oss / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"unexpected: model.layers.0.mlp.experts.down_proj_blocks"):
        import_huggingface(gpt_oss, tmp_path / "ckpt")


def test_fp8_tensors_of_a_folder_appear_in_bf16(tmp_path):
    value = torch.randn(5, 6).to(torch.float8_e4m3fn)
    tensors = {"a.weight": value, "a.weight_scale_inv": torch.rand(2, 2), "b.weight": value.clone(), "c": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    folder = DequantizedFolder(HuggingFaceFolder(tmp_path))
    kinds = {name: (info.dtype, tuple(info.shape)) for name, info in folder.tensors.items()}
    assert kinds == {"a.weight": ("BF16", (5, 6)), "b.weight": ("F8_E4M3", (5, 6)), "c": ("F32", (2,))}
    assert torch.equal(folder.read("a.weight"), dequantize_fp8(value, tensors["a.weight_scale_inv"], 4, 4))


def test_one_expert_of_mxfp4_is_the_one_of_all(gpt_oss):
    weights = HuggingFaceWeights(HuggingFaceFolder(gpt_oss))
    name = "layers.0.mlp.experts.gate_proj.weight"
    whole = weights.read(name)
    assert all(torch.equal(weights.read(name, expert), whole[expert]) for expert in range(len(whole)))
