"""scripts/bench gpu: what it writes, on a processor with tiny shapes, and what a failure or too little time costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import gpu  # noqa: E402
from gpu_parts.report import report  # noqa: E402
from gpu_parts.setting import Setting  # noqa: E402

SMALL = Setting("cpu", small=True, compile=False)
CHOSEN = ("kernels: SwiGLU", "training: 8B shape, 4 layers, 2048, bf16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a run of two cases."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["--out", str(folder), "--device", "cpu", "--small", "--only", *CHOSEN]
    assert gpu.main(arguments) == 0, (folder / "log.txt").read_text()
    return folder


@pytest.mark.slow
def test_every_case_is_written_and_shown(measured):
    rows = {row["kind"]: row for row in json.loads((measured / "results.json").read_text())["results"]}
    forms = rows["kernels"]["forms"]
    assert forms["ours"]["error"] < 1e-2
    trained = rows["training"]
    assert 3 < trained["losses"][1] < trained["losses"][0] < 8
    assert trained["planned_gb"] > 0
    assert "steps 1 to 1" in trained["profile"]
    table = (measured / "report.md").read_text()
    assert "small mode" in table
    assert all(case.split(": ")[-1] in table for case in CHOSEN)


def test_the_parts_hold_every_kernel_ceiling_and_workload():
    from gpu_parts.ceilings import ceilings
    from gpu_parts.checks import CHECKS
    from gpu_parts.kernels import KERNELS
    from gpu_parts.workloads import WORKLOADS

    cases = {}
    for part in gpu.PARTS:
        cases.setdefault(part.kind, []).extend(part.cases)
    assert cases["ceilings"] == list(ceilings(SMALL))
    assert cases["kernels"] == list(KERNELS)
    assert sorted(cases["training"]) == sorted(WORKLOADS)
    assert set(cases["transformers"]) < set(WORKLOADS)
    assert sorted(cases["checks"]) == sorted(CHECKS)


ROUNDING = {
    **{"attention, documents": 0.02, "linear and cross-entropy": 0.02},
    **{"fp8 linear, blockwise": 0.08, "fp8 grouped linear, blockwise": 0.06},
}
"""Of bf16; of two operands in e4m3, 3 % each by its three bits; and 5 % of gradients in e5m2 by its two."""


@pytest.mark.parametrize("name", ROUNDING)
def test_forms_of_a_kernel_agree(name):
    from gpu_parts.kernels import measure

    forms = measure(name, SMALL)["forms"]
    assert len(forms) > 1
    assert all(0 <= form["error"] < ROUNDING[name] for form in forms.values()), forms


def test_ceilings_are_rates():
    from gpu_parts.ceilings import ceilings

    found = {name: measure() for name, measure in ceilings(SMALL).items()}
    assert found["memory copy"]["gigabytes_per_second"] > 0
    assert found["bf16 matmul"]["tflops"] > 0
    assert "need a GPU" in found["fp8 matmul, scale of each row"]["left_out"]


@pytest.fixture
def known_machine(monkeypatch):
    """Finding the versions takes a process that imports torch."""
    monkeypatch.setattr(gpu, "_machine", lambda setting: "a machine")


@pytest.mark.usefixtures("known_machine")
def test_a_part_without_time_is_left_out_and_said(tmp_path):
    results = gpu.measure([gpu.Part("kernels", ("RMSNorm", "rope"), 60)], SMALL, tmp_path, 0.0)
    assert [row["left_out"] for row in results.rows] == ["takes about 60 s, and 0 s are left"] * 2
    assert "left out: kernels: rope: takes about 60 s" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("known_machine")
def test_a_case_that_ends_its_process_costs_no_other_case(tmp_path, monkeypatch):
    def run(kind, setting, out, cases, log, seconds):
        if cases[0] == "b":
            return -11
        done = cases[: cases.index("b")] if "b" in cases else cases
        out.write_text("".join(json.dumps({"kind": kind, "case": case, "wall": 1.0}) + "\n" for case in done))
        return -11 if "b" in cases else 0

    monkeypatch.setattr(gpu, "_run_process", run)
    rows = gpu.measure([gpu.Part("x", ("a", "b", "c"), 1)], SMALL, tmp_path, 30.0).rows
    assert [row["case"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["failed"] == "the process ended with -11; see log.txt"
    assert "failed" not in rows[2]


def test_a_process_past_its_limit_is_stopped_with_what_it_started(tmp_path):
    rows = []
    with open(tmp_path / "log.txt", "w") as log:
        for part in [gpu.Part("kernels", ("RMSNorm", "rope"), 60)]:
            rows += gpu._run_part(part, SMALL, log, left=0.05)
    assert [row.get("failed") or row["left_out"] for row in rows] == ["stopped at its time limit", "no time was left"]


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
        {"kind": "checks", "case": "gpu tests", "tests": 3, "skipped": 1, "failures": {"test_a": "\nE  wrong\n"}},
        {"kind": "checks", "case": "quickstart", "failed": "exit code 5"},
    ]
    found = report(rows, "a card")
    assert "| RMSNorm | ours | 0.100 | 50% | 1.0e-03 |" in found
    assert "| RMSNorm | liger | | | ImportError: a/b |" in found
    assert "| Llama-3.2-1B, 8192, bf16 | 50,000 | 50.0% | 100.0% | 2.000 | 1.000 | 46.6 | 46.5 |" in found
    assert "gpu tests: 3, 1 failed, 1 skipped\n  test_a: E  wrong" in found
    assert "failed: checks: quickstart: exit code 5" in found
