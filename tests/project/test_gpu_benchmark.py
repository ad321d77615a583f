"""scripts/bench gpu: what it writes, on a processor with tiny shapes, and what a failure or too little time costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from slow_cases import slow_but

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import gpu  # noqa: E402
from gpu_parts import kernel, kernels, workloads  # noqa: E402
from gpu_parts.parts import PARTS, Part, share_of  # noqa: E402
from gpu_parts.report import report  # noqa: E402
from gpu_parts.setting import Setting  # noqa: E402
from gpu_parts.worker import NEXT_PROCESS  # noqa: E402

from megalaunch.config.compose import compose  # noqa: E402
from megalaunch.kernels.geglu import geglu_reference  # noqa: E402
from megalaunch.kernels.layer_norm import layer_norm_reference  # noqa: E402
from megalaunch.kernels.rms_norm import rms_norm_reference  # noqa: E402
from megalaunch.kernels.swiglu import swiglu_reference  # noqa: E402
from megalaunch.plan.check import check  # noqa: E402
from megalaunch.plan.cost import step_time  # noqa: E402
from megalaunch.plan.memory import predict_memory  # noqa: E402

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
    from gpu_parts.workloads import WORKLOADS

    cases = {}
    for part in PARTS:
        cases.setdefault(part.kind, []).extend(part.cases)
    assert cases["ceilings"] == list(ceilings(SMALL))
    assert cases["kernels"] == list(kernels.KERNELS)
    assert sorted(cases["training"]) == sorted(WORKLOADS)
    assert set(cases["transformers"]) < set(WORKLOADS)
    assert sorted(cases["checks"]) == sorted(CHECKS)


QUICK_WORKLOADS = ("8B shape, 8 layers, 8192, fp8", "GPT-2 124M, 2048, bf16, graphs")


@pytest.mark.parametrize("name", slow_but(workloads.WORKLOADS, *QUICK_WORKLOADS))
def test_every_workload_is_a_run_that_an_h100_has_room_for(name, monkeypatch):
    def compose_for_h100(words):
        return compose(["platform=h100" if word == "platform=auto" else word for word in words])

    monkeypatch.setattr(workloads, "compose", compose_for_h100)
    spec = workloads.WORKLOADS[name].spec(Setting("cuda", small=False, compile=True))
    assert spec.platform.chip == "h100"
    assert not [found for found in check(spec) if found.severity == "error"]
    assert predict_memory(spec).total < 70e9
    assert step_time(spec).total < 2  # warming up, timing and profiling take nine steps


STEPS = [part for part in PARTS if part.kind in ("training", "transformers")]
QUICK_MODELS = ("GPT-2 124M", "Qwen3-30B-A3B shape, 2 layers")


@pytest.mark.parametrize(
    "part",
    slow_but(STEPS, slow=[part for part in STEPS if part.group in QUICK_MODELS]),
    ids=lambda part: f"{part.kind} {part.group}",
)
def test_every_step_runs(part, tmp_path):
    rows = gpu.measure([part], SMALL, tmp_path, 1500.0).rows
    assert not [row for row in rows if row.keys() & {"failed", "left_out"}], (tmp_path / "log.txt").read_text()
    assert [row["case"] for row in rows] == list(part.cases)
    assert all(3 < loss < 8 for row in rows for loss in row["losses"])


@pytest.fixture
def as_on_a_card(monkeypatch):
    """Let Liger be installed and torch.compile be in use, by functions that compute the same."""

    def compile(function):
        return lambda *inputs: function(*inputs)

    def cross_entropy(x, w, labels, reduction):
        return torch.nn.functional.cross_entropy((x @ w.T).float(), labels, reduction=reduction)

    def rotated(q, k, cos, sin):
        return [x * cos + torch.cat((-x[..., 32:], x[..., :32]), -1) * sin for x in (q, k)]

    liger = SimpleNamespace(
        liger_rms_norm=lambda x, w, epsilon, in_place: rms_norm_reference(x, w, epsilon),
        liger_layer_norm=layer_norm_reference,
        liger_fused_add_rms_norm=lambda x, update, w, epsilon, in_place: (
            rms_norm_reference(x + update, w, epsilon),
            x + update,
        ),
        liger_swiglu=swiglu_reference,
        liger_geglu=lambda gate, up: geglu_reference(gate, up, "geglu_tanh"),
        liger_rope=rotated,
        liger_fused_linear_cross_entropy=cross_entropy,
    )
    monkeypatch.setattr(kernels, "liger_functions", lambda: liger)
    monkeypatch.setattr(torch, "compile", compile)
    return Setting("cpu", small=True, compile=True)


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_all_forms_of_a_kernel_agree(name, as_on_a_card):
    forms = kernels.measure(name, as_on_a_card)["forms"]
    assert len(forms) > 1
    assert not [form for form in forms.values() if "failed" in form], forms
    # Of bf16; of two operands in e4m3, 3 % each by its three bits; and of gradients in e5m2, 5 % by its two.
    rounding = 0.08 if "linear" in name and "fp8" in name else 0.02
    assert all(0 <= form["error"] < rounding for form in forms.values()), forms


def test_a_form_that_writes_into_its_inputs_costs_no_other_form(monkeypatch):
    x = torch.ones(4, requires_grad=True)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            made = 2 * x
            x.data.zero_()
            return made

        @staticmethod
        def backward(ctx, upstream):
            return upstream.mul_(2)

    forms = {"reference": lambda x: 2 * x, "in place": Doubled.apply, "again": lambda x: 2 * x}
    monkeypatch.setitem(kernels.KERNELS, "doubled", lambda at: kernel.Kernel((x,), forms))
    found = kernels.measure("doubled", SMALL)["forms"]
    assert [form["error"] for form in found.values()] == [0.0, 0.0, 0.0]


def test_ceilings_are_rates():
    from gpu_parts.ceilings import ceilings

    found = {name: measure() for name, measure in ceilings(SMALL).items()}
    assert found["memory copy"]["gigabytes_per_second"] > 0
    assert found["bf16 matmul"]["tflops"] > 0
    assert "need a GPU" in found["fp8 matmul, scale of each row"]["left_out"]


@pytest.fixture
def known_machine(monkeypatch):
    """Finding the versions takes a process that imports torch."""
    monkeypatch.setattr(gpu, "_machine", lambda setting: ("a machine", ""))


def part(kind, *cases, seconds=60):
    return Part(kind, dict.fromkeys(cases, seconds), "group")


@pytest.mark.usefixtures("known_machine")
def test_a_part_without_time_is_left_out_and_said(tmp_path):
    results = gpu.measure([part("kernels", "RMSNorm", "rope")], SMALL, tmp_path, 0.0)
    assert [row["left_out"] for row in results.rows] == ["takes about 72 s, and 0 s are left"] * 2
    assert "left out: kernels: rope: takes about 72 s" in (tmp_path / "report.md").read_text()


WORKER = """
import json, subprocess, sys, time
kind, setting, out, *cases = sys.argv[1:]
for number, case in enumerate(cases):
    if case == "dies":
        sys.exit(7)
    if case == "hangs":
        child = subprocess.Popen(["sleep", "60"])
        open({child!r}, "w").write(str(child.pid))
        time.sleep(60)
    if case == "leaks" and number:
        sys.exit({next_process})
    open(out, "a").write(json.dumps({{"kind": kind, "case": case, "wall": 0.1, "with": cases}}) + "\\n")
"""


@pytest.fixture
def rows_of(tmp_path, monkeypatch, known_machine):
    """Measure cases in processes that do what the name of a case says."""
    program = tmp_path / "program.py"
    program.write_text(WORKER.format(next_process=NEXT_PROCESS, child=str(tmp_path / "child")))

    def start(kind, setting, out, cases, log):
        command = [sys.executable, "-S", str(program), kind, "", str(out), *cases]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(gpu, "_start", start)
    monkeypatch.setattr(gpu, "START_SECONDS", 0)
    monkeypatch.setattr(gpu, "_SPARE_SECONDS", 1.0)
    return lambda *cases: gpu.measure([part("x", *cases, seconds=0)], SMALL, tmp_path, 30.0).rows


def test_the_cases_of_a_part_share_a_process(rows_of):
    assert [row["with"] for row in rows_of("a", "b")] == [["a", "b"]] * 2


def test_a_case_that_ends_its_process_costs_no_other_case(rows_of):
    rows = rows_of("a", "dies", "b", "c")
    assert [row["case"] for row in rows] == ["a", "dies", "b", "c"]
    assert rows[1]["failed"] == "the process ended with 7; see log.txt"
    assert [row["with"] for row in rows[2:]] == [["b", "c"]] * 2


def test_a_case_that_hangs_is_stopped_with_what_it_started_and_costs_no_other_case(rows_of, tmp_path):
    rows = rows_of("a", "hangs", "b")
    assert [row.get("failed") for row in rows] == [None, "stopped at its time limit", None]
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_process_that_would_disturb_the_next_case_is_replaced(rows_of):
    rows = rows_of("a", "leaks", "b")
    assert [row["with"] for row in rows] == [["a", "leaks", "b"], ["leaks", "b"], ["leaks", "b"]]


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_the_shares_of_several_commands_are_all_cases(of):
    shares = [share_of(PARTS, number + 1, of) for number in range(of)]
    assert sorted(id(one) for share in shares for one in share) == sorted(map(id, PARTS))
    for share in shares:  # in order, and no group apart
        assert share == [one for one in PARTS if one in share]
        assert not {one.group for one in share} & {one.group for one in PARTS if one not in share}


def test_three_commands_measure_everything_in_nine_minutes_each():
    assert max(sum(one.seconds for one in share_of(PARTS, number, 3)) for number in (1, 2, 3)) < 520


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_wrong_share_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--out", "x", "--part", text])
    assert f"'{text}' is not K/N" in capsys.readouterr().err


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
