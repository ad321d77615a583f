"""scripts/bench gpu: what it writes, on a processor with tiny shapes, and what a failure or too little time costs."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from slow_cases import slow_but

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))

import gpu  # noqa: E402
from gpu_parts import kernel, kernels, parts, worker, workloads  # noqa: E402
from gpu_parts.float8_kernels import require_card  # noqa: E402
from gpu_parts.parts import (  # noqa: E402
    EXTRA,
    PARTS,
    STEP_SECONDS,
    Cost,
    Part,
    plan_ahead,
    planned_seconds,
    share_of,
    with_profiles,
)
from gpu_parts.setting import Setting, Unsupported  # noqa: E402
from gpu_parts.worker import NEXT_PROCESS  # noqa: E402

from megalaunch.config.compose import compose  # noqa: E402
from megalaunch.kernels.float8_cast import Float8Matrix  # noqa: E402
from megalaunch.kernels.geglu import geglu_reference  # noqa: E402
from megalaunch.kernels.layer_norm import layer_norm_reference  # noqa: E402
from megalaunch.kernels.rms_norm import rms_norm_reference  # noqa: E402
from megalaunch.kernels.swiglu import swiglu_reference  # noqa: E402
from megalaunch.plan.check import check  # noqa: E402
from megalaunch.plan.cost import step_time  # noqa: E402
from megalaunch.plan.memory import predict_memory  # noqa: E402
from megalaunch.schema.precision import Float8Recipe  # noqa: E402

SMALL = Setting("cpu", small=True, compile=False)
CHOSEN = ("kernels: SwiGLU", "training: 8B shape, 4 layers, 2048, bf16")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a run of two cases."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ["--out", str(folder), "--device", "cpu", "--small", "--profile", "--only", *CHOSEN]
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
    for name in (name for part in PARTS for name in part.cases):
        kind, _, case = name.partition(": ")
        cases.setdefault(kind, []).append(case)
    assert cases["ceilings"] == list(ceilings(SMALL))
    assert cases["kernels"] == list(kernels.KERNELS)
    assert sorted(cases["training"]) == sorted(WORKLOADS)
    assert set(cases["transformers"]) < set(WORKLOADS)
    assert sorted(cases["checks"]) == sorted(CHECKS)


QUICK_WORKLOADS = ("8B shape, 8 layers, 8192, fp8", "GPT-2 124M, 2048, bf16, graphs")


QWEN3 = "Qwen3-30B-A3B shape, 2 layers, 8192, bf16"


def on_h100(name, monkeypatch):
    """A workload whose spec is that of an H100."""

    def compose_for_h100(words):
        return compose(["platform=h100" if word == "platform=auto" else word for word in words])

    monkeypatch.setattr(workloads, "compose", compose_for_h100)
    return workloads.WORKLOADS[name]


@pytest.mark.parametrize("name", slow_but(workloads.WORKLOADS, *QUICK_WORKLOADS))
def test_every_workload_is_a_run_that_an_h100_has_room_for(name, monkeypatch):
    spec = on_h100(name, monkeypatch).spec(Setting("cuda", small=False, compile=True))
    assert spec.platform.chip == "h100"
    assert not [found for found in check(spec) if found.severity == "error"]
    assert predict_memory(spec).total < 70e9
    model, case = next((model, name.removeprefix(f"{model}, ")) for model in STEP_SECONDS if name.startswith(model))
    assert 0.8 < step_time(spec).total / STEP_SECONDS[model][case] < 1.05


@pytest.mark.parametrize("name", slow_but(["8B shape, 4 layers, 8192, fp8", QWEN3], "8B shape, 4 layers, 8192, fp8"))
def test_a_layer_is_compiled_ahead_in_a_small_model(name, monkeypatch):
    whole, small = (
        workload.spec(Setting("cuda", small=False, compile=True))
        for workload in (on_h100(name, monkeypatch), on_h100(name, monkeypatch).of_one_layer())
    )
    differ = {"num_layers": 1, "vocab_size": 512}
    assert small.model == replace(whole.model, **differ)
    assert small.batch == replace(whole.batch, global_batch_size=whole.batch.micro_batch_size)
    assert (small.precision, small.train.compile) == (whole.precision, True)
    assert predict_memory(small).total < 0.2 * 80e9  # what each of four processes may take


STEPS = [part for part in PARTS if part.group not in ("checks", "kernels")]
QUICK_STEPS = ("training: GPT-2 124M, 2048, bf16", "transformers: Qwen3-30B-A3B shape, 2 layers, 8192, bf16")


@pytest.mark.parametrize(
    "part",
    slow_but(STEPS, slow=[part for part in STEPS if set(QUICK_STEPS) & set(part.cases)]),
    ids=lambda part: next(iter(part.cases)),
)
def test_every_step_runs(part, tmp_path):
    rows = gpu.measure([part], SMALL, tmp_path, 1500.0).rows
    assert not [row for row in rows if row.keys() & {"failed", "left_out"}], (tmp_path / "log.txt").read_text()
    assert [f"{row['kind']}: {row['case']}" for row in rows] == list(part.cases)
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


def test_delayed_scales_are_known_when_a_linear_layer_is_timed(monkeypatch):
    casts = []
    cast = Float8Matrix.quantize_with_amax
    monkeypatch.setattr(Float8Matrix, "quantize_with_amax", lambda *inputs: casts.append(inputs) or cast(*inputs))
    kernels.measure("fp8 linear, delayed", replace(SMALL, ahead=True))
    assert casts  # of the first step, whose scales follow from its own amaxes, there is none


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

    found = {name: measure() for name, measure in ceilings(SMALL).items() if "fp8" not in name}
    assert found["memory copy"]["gigabytes_per_second"] > 0
    assert found["bf16 matmul"]["tflops"] > 0


def rows_of_worker(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_case_that_the_device_cannot_run_says_so(tmp_path):
    assert worker.main(SMALL, tmp_path / "rows", ["ceilings: fp8 matmul, scale of each row"]) == 0
    (row,) = rows_of_worker(tmp_path / "rows")
    assert row["unsupported"] == "fp8 matmuls need a GPU"
    assert not row.keys() & {"failed", "left_out"}


def test_checks_run_at_once(tmp_path, monkeypatch):
    meet = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(worker, "_measure", lambda kind, case, setting: {"number": meet.wait()})
    worker.main(SMALL, tmp_path / "rows", ["checks: a", "checks: b"])
    assert [(row["case"], "failed" in row) for row in rows_of_worker(tmp_path / "rows")] == [("a", False), ("b", False)]


def test_what_is_compiled_ahead_is_not_timed(monkeypatch):
    monkeypatch.setattr(kernels, "median_seconds", lambda call, device: pytest.fail("timed"))
    assert not kernels.measure("SwiGLU", replace(SMALL, ahead=True))["forms"]


@pytest.mark.parametrize(
    ("recipe", "major", "has"),
    [("mxfp8", 9, False), ("mxfp8", 10, True), ("blockwise", 9, True), ("blockwise", 10, False), ("delayed", 9, True)],
)
def test_fp8_recipes_are_measured_where_the_card_has_them(recipe, major, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    expected = nullcontext() if has else pytest.raises(Unsupported, match=f"{recipe} matmuls need")
    with expected:
        require_card(recipe, Setting("cuda", small=False, compile=True))


@pytest.fixture
def known_machine(monkeypatch):
    """Finding the versions takes a process that imports torch."""
    monkeypatch.setattr(gpu, "_machine", lambda setting: ("a machine", ""))


def part(kind, *cases, seconds=60, process="one"):
    return Part({f"{kind}: {case}": Cost(seconds) for case in cases}, "group", process)


@pytest.mark.usefixtures("known_machine")
def test_a_part_without_time_is_left_out_and_said(tmp_path):
    results = gpu.measure([part("kernels", "RMSNorm", "rope")], SMALL, tmp_path, 0.0)
    why = "RMSNorm takes about 72 s, and 0 s are left"
    assert [row["left_out"] for row in results.rows] == [why] * 2
    table = (tmp_path / "report.md").read_text()
    assert f"left out ({why}): kernels: RMSNorm; kernels: rope" in table
    assert "scripts/bench gpu --out DIR2 --only 'kernels: RMSNorm' 'kernels: rope'" in table


WORKER = """
import json, subprocess, sys, time
out, *cases = sys.argv[1:]
for number, name in enumerate(cases):
    kind, _, case = name.partition(": ")
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

    def start(setting, out, names, log):
        command = [sys.executable, "-S", str(program), str(out), *names]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(gpu, "_start", start)
    monkeypatch.setattr(parts, "START_SECONDS", 0)
    monkeypatch.setattr(gpu, "_SPARE_SECONDS", 1.0)
    return lambda *cases: gpu.measure([part("x", *cases, seconds=0)], SMALL, tmp_path, 30.0).rows


def test_the_cases_of_a_part_share_a_process(rows_of):
    assert [row["with"] for row in rows_of("a", "b")] == [["x: a", "x: b"]] * 2


def test_a_case_that_ends_its_process_costs_no_other_case(rows_of):
    rows = rows_of("a", "dies", "b", "c")
    assert [row["case"] for row in rows] == ["a", "dies", "b", "c"]
    assert rows[1]["failed"] == "the process ended with 7; see log.txt"
    assert [row["with"] for row in rows[2:]] == [["x: b", "x: c"]] * 2


def test_a_case_that_hangs_is_stopped_with_what_it_started_and_costs_no_other_case(rows_of, tmp_path):
    rows = rows_of("a", "hangs", "b")
    assert [row.get("failed") for row in rows] == [None, "stopped at its time limit", None]
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_a_process_that_would_disturb_the_next_case_is_replaced(rows_of):
    rows = rows_of("a", "leaks", "b")
    assert [row["with"] for row in rows] == [
        ["x: a", "x: leaks", "x: b"],
        ["x: leaks", "x: b"],
        ["x: leaks", "x: b"],
    ]


NOTES = """
import sys, time
notes, awaited, out, *names = sys.argv[1:]
def note(word):
    with open(notes, "a") as file:
        file.write(word + " " + names[0] + "\\n")
note("start")
deadline = time.monotonic() + 60
while not set(filter(None, awaited.split(","))) <= set(open(notes).read().splitlines()) and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.5 if awaited.startswith("end") else 0)  # what does not wait for this one goes on meanwhile
note("end")
for name in names:
    kind, case = name.split(": ")
    with open(out, "a") as file:
        file.write('{"kind": "%s", "case": "%s", "wall": 0.1}\\n' % (kind, case))
"""


@pytest.fixture
def notes_of(tmp_path, monkeypatch, known_machine):
    """Measure parts, with processes that write notes when they start and end; return rows and notes.

    A process that compiles ahead ends after the note `ahead_of`, one that runs the case c after those of `c_after`.
    """
    program, notes = tmp_path / "program.py", tmp_path / "notes"
    program.write_text(NOTES)

    def run(parts, ahead_of, c_after=""):
        def start(setting, out, names, log):
            awaited = ahead_of if setting.ahead else c_after if [*names] == ["x: c"] else ""
            command = [sys.executable, "-S", str(program), str(notes), awaited, str(out), *names]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

        monkeypatch.setattr(gpu, "_start", start)
        monkeypatch.setattr("os.cpu_count", lambda: 16)
        rows = gpu.measure(parts, Setting("cuda", small=False, compile=True), tmp_path, 600.0).rows
        return rows, notes.read_text().splitlines()

    return run


TO_COMPILE = Part({"x: a": Cost(0, 10, 10), "x: b": Cost(0, 10, 10)}, "x", "x")


def test_code_is_compiled_during_the_checks_and_before_anything_is_timed(notes_of, monkeypatch):
    monkeypatch.setattr(parts, "START_SECONDS", 2)
    checks = part("x", "c", seconds=20, process="checks")
    rows, notes = notes_of([TO_COMPILE, checks][::-1], "end x: c", "start x: a,start x: b")
    assert [row["case"] for row in rows] == ["c", "a", "b"]
    assert sorted(notes[:3]) == ["start x: a", "start x: b", "start x: c"]
    assert notes[3] == "end x: c"
    assert sorted(notes[4:6]) == ["end x: a", "end x: b"]
    assert notes[6:] == ["start x: a", "end x: a"]  # the run


def test_a_process_that_compiles_for_too_long_is_stopped(notes_of, monkeypatch):
    monkeypatch.setattr(parts, "START_SECONDS", 0)
    quick = Part({"x: a": Cost(0, 0.5, 0.5), "x: b": Cost(0, 0.5, 0.5)}, "x", "x")
    rows, notes = notes_of([quick], "a note that nobody writes")
    assert [row["case"] for row in rows] == ["a", "b"]
    assert notes[-2:] == ["start x: a", "end x: a"]
    assert notes.count("end x: a") == 1


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_the_shares_of_several_commands_are_all_cases(of):
    shares = [share_of(PARTS, number + 1, of) for number in range(of)]
    assert sorted(id(one) for share in shares for one in share) == sorted(map(id, PARTS))
    for share in shares:  # in order, and no group apart
        assert share == [one for one in PARTS if one in share]
        assert not {one.group for one in share} & {one.group for one in PARTS if one not in share}


DEFAULT = [name for part in gpu.selected([], False, None) for name in part.cases]
SHAPES = ("Llama-3.2-1B", "8B shape, 4 layers", "8B shape, 8 layers", "GPT-2 124M", "Qwen3-30B-A3B shape, 2 layers")
"""The models whose steps a command must time."""
OTHER_FORMS = {  # of a kernel that one command measures in another form
    "attention, sinks",
    "GEGLU, exact",
    "GEGLU, quick",
    "residual and LayerNorm",
    "fp8 grouped linear, rowwise",
    "fp8 grouped linear, mxfp8",
    "fp8 grouped linear, blockwise, e4m3",
}
OF_ONE_COMMAND = {
    "ceilings": {"bf16 matmul", "fp8 matmul, scale of the tensor", "fp8 matmul, scale of each row", "memory copy"},
    "kernels": set(kernels.KERNELS) - OTHER_FORMS,
    "training": {f"{m}, {s}, {p}" for m in SHAPES for s in (8192, 2048) for p in ("bf16", "fp8")},
    "transformers": {f"{m}, {2048 if 'GPT-2' in m else 8192}, bf16" for m in SHAPES},
    "checks": {"quickstart", "gpu tests"},
}


def test_one_command_covers_the_card_each_kernel_each_model_and_the_checks():
    required = {f"{kind}: {case}" for kind, cases in OF_ONE_COMMAND.items() for case in cases}
    assert not required - set(DEFAULT)
    assert {name for part in PARTS for name in part.cases} == {*DEFAULT, *EXTRA}


@pytest.mark.parametrize("recipe", get_args(Float8Recipe))
def test_one_command_measures_a_linear_layer_by_every_fp8_recipe(recipe):
    assert f"kernels: fp8 linear, {recipe}" in DEFAULT


def test_one_command_measures_what_it_must_within_nine_minutes():
    seconds = planned_seconds(gpu.selected([], False, None))
    assert 400 < seconds < gpu.SECONDS - 15  # a case more or less, or an estimate, is looked at again
    assert gpu.SECONDS + 15 < 9 * 60


def test_two_commands_measure_everything_in_nine_minutes_each():
    for number in (1, 2):
        assert planned_seconds(gpu.selected([], True, (number, 2))) < gpu.SECONDS - 15


def test_an_estimate_counts_what_runs_at_once_once():
    checks = part("checks", "a", "b", seconds=50, process="checks")
    runs = [Part({f"x: {n}": Cost(1, 16, 20) for n in range(8)}, "x", "x"), Part({"y: 1": Cost(2)}, "y", "x")]
    assert planned_seconds([checks]) == 4 + 101
    assert planned_seconds(runs) == 4 + (12 + 40) + (12 + 8 + 2)  # compiled by four processes, two cases each
    assert planned_seconds([checks, *runs]) == 4 + 101 + 22
    assert planned_seconds(runs[1:]) == 4 + 14
    profiled = with_profiles([part("training", "a", seconds=1), part("x", "a", seconds=1)])
    assert [cost.run for one in profiled for cost in one.cases.values()] == [6, 1]


def test_compiling_is_shared_by_processes_where_that_saves_time():
    runs = [Part({f"x: {n}": Cost(1, 16, 20) for n in range(8)}, "x", "x")]
    ahead = plan_ahead(runs, 3)
    assert sorted(name for share in ahead.shares for name in share) == sorted(runs[0].cases)
    assert ahead.seconds == 12 + 60
    assert not plan_ahead(runs, 1).shares  # a process beside the runs would compile no faster
    assert not plan_ahead([part("x", "a", seconds=10)], 4).shares


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_wrong_share_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--out", "x", "--part", text])
    assert f"'{text}' is not K/N" in capsys.readouterr().err
