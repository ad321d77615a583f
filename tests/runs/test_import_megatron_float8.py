"""What an import makes of Megatron's flags of attention in fp8."""

import pytest

from megalaunch.runs.import_megatron.importer import import_script

FLAG = "fp8-dot-product-attention"


def _imported(flags):
    return import_script(f"torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 {flags}", "imported", "x")


@pytest.mark.parametrize("others", ["--fp8-format hybrid", "--fp8-hybrid --attention-backend fused"])
def test_it_is_transformer_engines(others):
    values = _imported(f"{others} --{FLAG}").values
    assert values["precision.fp8.dot_product_attention"]
    assert values["precision.fp8.implementation"] == "transformer_engine"
    assert values["model.attention_backend"] == "te"


def test_without_fp8_it_is_ignored():
    imported = _imported(f"--bf16 --{FLAG}")
    (report,) = (entry for entry in imported.flags if entry.flag == f"--{FLAG}")
    assert (report.status, report.text) == ("ignored", "has no effect without --fp8-format")
    assert "model.attention_backend" not in imported.values


def test_that_of_whole_blocks_is_not_supported():
    (report,) = (e for e in _imported("--fp8-format e4m3 --fp8-multi-head-attention").flags if "multi-head" in e.flag)
    assert report.status == "unsupported"
    assert "normed and rotated" in report.text
