"""The report of scripts/bench gpu: its tables, the bars of an H100, and the results of several commands in one."""

from __future__ import annotations

import json
import sys

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import gpu
from gpu_parts.report import report


def results(folder, card, *rows):
    folder.mkdir()
    found = [{"kind": "kernels", "case": case, **row} for case, row in rows]
    (folder / "results.json").write_text(json.dumps({"machine": f"on {card}", "card": card, "results": found}))
    return str(folder)


def kernel_row(milliseconds):
    return {"wall": 1.0, "fp8": False, "forms": {"ours": {"milliseconds": milliseconds, "error": 0.0}}}


def test_results_of_several_commands_are_merged_into_one_table(tmp_path, capsys):
    first = results(tmp_path / "1", "A", ("rope", kernel_row(1.0)), ("SwiGLU", {"left_out": "no time"}))
    second = results(tmp_path / "2", "A", ("SwiGLU", kernel_row(2.0)), ("rope", {"failed": "out of memory"}))
    assert gpu.main(["--out", str(tmp_path / "all"), "--merge", first, second]) == 0
    table = (tmp_path / "all" / "report.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert "| rope | ours | 1.000 |" in table
    assert "| SwiGLU | ours | 2.000 |" in table
    assert "failed" not in table
    assert "left out" not in table
    assert len(json.loads((tmp_path / "all" / "results.json").read_text())["results"]) == 2


def test_results_of_two_cards_are_not_merged(tmp_path, capsys):
    folders = [results(tmp_path / card, card, ("rope", kernel_row(1.0))) for card in ("A", "B")]
    for wrong, said in ((folders, "several cards: A, B"), ([str(tmp_path)], "no results.json in")):
        with pytest.raises(SystemExit):
            gpu.main(["--out", str(tmp_path / "all"), "--merge", *wrong])
        assert said in capsys.readouterr().err


def test_the_report_of_a_card():
    rows = [
        {"kind": "ceilings", "case": "bf16 matmul", "tflops": 800.0},
        {"kind": "ceilings", "case": "memory copy", "gigabytes_per_second": 3000.0},
        {
            "kind": "kernels",
            "case": "RMSNorm",
            "fp8": False,
            "forms": {
                "ours": {"milliseconds": 0.1, "error": 0.001, "gigabytes_per_second": 1500.0},
                "liger": {"failed": "ImportError: a|b"},
            },
        },
        {
            "kind": "training",
            "case": "Llama-3.2-1B, 8192, bf16",
            "tokens_per_second": 50000.0,
            "mfu_causal": 0.5,
            "step_seconds": 2.0,
            "planned_seconds": 1.0,
            "peak_gb": 46.6,
            "planned_gb": 46.5,
        },
        {
            "kind": "transformers",
            "case": "Llama-3.2-1B, 8192, bf16",
            "tokens_per_second": 25000.0,
            "step_seconds": 4.0,
            "peak_gb": 60.0,
        },
        {"kind": "checks", "case": "gpu tests", "tests": 3, "skipped": 1, "failures": {"test_a": "\nE  wrong\n"}},
        {"kind": "checks", "case": "quickstart", "failed": "exit code 5"},
    ]
    found = report(rows, "a card", "NVIDIA H200")
    assert "| RMSNorm | ours | 0.100 | 50% | 1.0e-03 |" in found
    assert "| RMSNorm | liger | | | ImportError: a/b |" in found
    assert (
        "| Llama-3.2-1B, 8192, bf16 | 50,000 | | 2.00 | 50.0% | 2.000 | 1.000, -50.0% | 46.6 | 46.5, -0.2% | 60.0 |"
    ) in found
    assert "| transformers: Llama-3.2-1B, 8192, bf16 | 25,000 | | | | 4.000 | | 60.0 | | |" in found
    assert "bars" not in found
    assert "gpu tests: 3, 1 failed, 1 skipped\n  test_a: E  wrong" in found
    assert "failed: checks: quickstart: exit code 5" in found


def test_the_report_names_what_was_left_out_and_the_command_that_measures_it():
    rows = [
        {"kind": "kernels", "case": "GEGLU, exact", "left_out": "measured with --all"},
        {"kind": "kernels", "case": "rope", "left_out": "rope takes about 3 s, and 1 s are left"},
        {"kind": "kernels", "case": "GEGLU, quick", "left_out": "measured with --all"},
        {"kind": "kernels", "case": "fp8 linear, mxfp8", "unsupported": "mxfp8 matmuls need Blackwell"},
    ]
    assert report(rows, "a card", "").splitlines()[2:] == [
        "not on this device: kernels: fp8 linear, mxfp8: mxfp8 matmuls need Blackwell",
        "",
        "left out (measured with --all): kernels: GEGLU, exact; kernels: GEGLU, quick",
        "left out (rope takes about 3 s, and 1 s are left): kernels: rope",
        "to measure what was left out: scripts/bench gpu --out DIR2 --only 'kernels: GEGLU, exact' "
        "'kernels: GEGLU, quick' 'kernels: rope'",
    ]


def step(case, tokens, mfu, planned_seconds=1.0, planned_gb=50.0):
    row = {"kind": "training", "case": case, "tokens_per_second": tokens, "mfu_causal": mfu, "step_seconds": 1.0}
    return {**row, "planned_seconds": planned_seconds, "peak_gb": 50.0, "planned_gb": planned_gb}


def test_bars_are_judged_on_the_card_that_they_are_stated_for():
    rows = [
        step("8B shape, 4 layers, 8192, bf16", 100.0, 0.6, planned_seconds=1.099, planned_gb=52.4),
        step("8B shape, 4 layers, 8192, fp8", 131.0, 0.7, planned_seconds=0.89, planned_gb=47.4),
        step("Llama-3.2-1B, 8192, bf16", 100.0, 0.519),
        step("Llama-3.2-1B, 8192, fp8", 129.0, 0.7),
        step("GPT-2 124M, 2048, bf16", 100.0, 0.3),
        step("GPT-2 124M, 2048, fp8", 100.0, 0.3),
    ]
    found = report(rows, "a machine", "NVIDIA H100 80GB HBM3")
    cells = {line.split(" | ")[0][2:]: [cell.strip() for cell in line.split("|")[3:]] for line in found.splitlines()}
    assert cells["8B shape, 4 layers, 8192, bf16"][2] == "60.0% (met: 60%)"
    assert cells["8B shape, 4 layers, 8192, bf16"][4] == "1.099, +9.9% (met: 10%)"
    assert cells["8B shape, 4 layers, 8192, bf16"][6] == "52.4, +4.8% (met: 5%)"
    assert cells["8B shape, 4 layers, 8192, fp8"][0] == "1.31 (met: 1.3x)"
    assert cells["8B shape, 4 layers, 8192, fp8"][2] == "70.0%"
    assert cells["8B shape, 4 layers, 8192, fp8"][4] == "0.890, -11.0% (MISSED: 10%)"
    assert cells["8B shape, 4 layers, 8192, fp8"][6] == "47.4, -5.2% (MISSED: 5%)"
    assert cells["Llama-3.2-1B, 8192, bf16"][2] == "51.9% (MISSED: 52%)"
    assert cells["Llama-3.2-1B, 8192, fp8"][0] == "1.29 (MISSED: 1.3x)"
    assert cells["GPT-2 124M, 2048, bf16"][2] == "30.0%"
    assert cells["GPT-2 124M, 2048, fp8"][0] == "1.00"
    assert "bars of one H100: 12 met, 4 missed" in found


@pytest.mark.parametrize("card", ["NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", ""])
def test_another_card_gets_figures_without_verdict(card):
    found = report([step("Llama-3.2-1B, 8192, bf16", 100.0, 0.1)], "a machine", card)
    assert "| 10.0% |" in found
    assert "met" not in found
    assert "MISSED" not in found
