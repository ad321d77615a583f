"""`megalaunch plan` as a user runs it, and its page: what is printed there is what the commands print."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from paths import ROOT
from typer.testing import CliRunner

from megalaunch.cli.app import app

PAGE = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
OVERRIDES = ("recipe=llama3_8b", "parallel=tp4pp4")

run = CliRunner()


def plan(*overrides):
    return run.invoke(app, ["plan", *overrides])


def _plain(text: str) -> str:
    return re.sub(r"(?m)^(  run +).*$", r"\1HERE", text.rstrip())


def test_the_page_shows_what_the_command_prints():
    shown = re.search(r"^\$ megalaunch plan (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1].split() == list(OVERRIDES)
    result = plan(*OVERRIDES)
    assert result.exit_code == 0
    assert _plain(result.output) == _plain(shown[2])


@pytest.mark.slow
def test_the_page_s_tables_are_those_of_the_benchmark():
    file = ROOT / "scripts/benchmarks/plan.py"
    spec = importlib.util.spec_from_file_location("plan_benchmark", file)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for part in benchmark.tables().split("\n\n"):
        assert part in PAGE, "docs/plan.md is stale: scripts/bench plan prints its tables"


def test_json_has_every_part():
    result = plan(*OVERRIDES, "--json", "--assumptions", "--tokens", "15T")
    report = json.loads(result.output)
    assert (result.exit_code, report["valid"]) == (0, True)
    tp, pp = report["ranks"]
    assert (tp["axis"], tp["size"], tp["count"], tp["first"], tp["inside_node"]) == ("tp", 4, 4, [0, 1, 2, 3], True)
    assert (pp["axis"], pp["first"], pp["inside_node"]) == ("pp", [0, 4, 8, 12], False)
    memory, time = report["memory"], report["time"]
    assert memory["total"] == pytest.approx(sum(memory["bytes"].values()))
    assert len(memory["total_by_pipeline_rank"]) == 4
    assert memory["total"] == max(memory["total_by_pipeline_rank"])
    exposed = sum(exchange["exposed"] for exchange in time["communication"].values())
    parts = sum(time["compute"].values()) + exposed + time["bubble"] + time["optimizer"]
    assert time["step_seconds"] == pytest.approx(parts)
    per_second = time["tokens_per_second_per_device"] * 16
    assert time["days"] == pytest.approx(15e12 / per_second / 86400)
    assert all({"name", "value", "source"} <= set(entry) and entry["source"] for entry in report["assumptions"])


def test_what_does_not_fit_is_planned_all_the_same_and_refused():
    result = plan("recipe=llama3_8b", "batch.micro_batch_size=8")
    assert result.exit_code == 2
    assert "error: batch.micro_batch_size  [memory.fits]" in result.output
    assert "peak memory of a rank" in result.output


def test_what_does_not_divide_has_findings_and_no_plan():
    result = plan("recipe=llama3_8b", "parallel=tp3pp7")
    assert result.exit_code == 2
    assert "error: parallel.tp" in result.output
    assert "no plan: " in result.output
    report = json.loads(plan("recipe=llama3_8b", "parallel=tp3pp7", "--json").output)
    assert report["valid"] is False
    assert "memory" not in report


def test_warnings_about_what_is_planned_are_shown_and_no_others():
    dispatcher = "parallel.moe_token_dispatcher_type=allgather"
    result = plan("recipe=mixtral_tiny", "parallel=dp1", "train.steps=100", "checkpoint.interval=0", dispatcher)
    assert result.exit_code == 0
    assert re.findall(r"^\w+: .*\[(.*)\]$", result.output, re.MULTILINE) == ["moe.dispatcher_without_ep"]
    assert result.output.startswith("warning: parallel.moe_token_dispatcher_type")


def test_an_open_vocabulary_is_asked_for():
    result = plan("recipe=tiny", "data.mock=false")
    assert result.exit_code == 2
    assert result.output.rstrip().endswith("is open; give the vocabulary (model.vocab_size=N) or the data")


def test_a_processor_has_memory_and_no_speed():
    result = plan("recipe=tiny", "data.corpus=x", "platform=cpu", "precision=fp32")
    assert result.exit_code == 0, result.output
    assert "not predicted: the speed of cpu is unknown" in result.output
    assert json.loads(plan("recipe=tiny", "data.corpus=x", "platform=cpu", "--json").output)["time"] is None


@pytest.mark.parametrize("text", ["1T", "1000B", "1e12"])
def test_a_budget_of_tokens(text):
    report = json.loads(plan(*OVERRIDES, "--json", "--tokens", text).output)
    time, devices = report["time"], 16
    assert time["budget_tokens"] == 1e12
    assert time["days"] == pytest.approx(1e12 / (time["tokens_per_second_per_device"] * devices) / 86_400)


@pytest.mark.parametrize("text", ["many", "-3B", "0", "3X"])
def test_a_budget_that_is_no_number_is_refused(text):
    result = plan(*OVERRIDES, f"--tokens={text}")
    assert result.exit_code == 2
    assert "is not a number of tokens: write 15T" in result.output


def test_devices_without_a_search_are_refused():
    result = plan(*OVERRIDES, "--devices", "64")
    assert result.exit_code == 2
    assert "--devices needs --search" in result.output


def test_an_override_of_no_key_is_refused_as_everywhere():
    result = plan("recipe=llama3_8b", "parallel.tpp=2")
    assert result.exit_code == 2
    assert "did you mean" in result.output


def test_torch_is_not_imported():
    code = (
        "import sys; from typer.testing import CliRunner; from megalaunch.cli.app import app;"
        "r = CliRunner().invoke(app, ['plan', 'recipe=llama3_8b']);"
        "assert r.exit_code == 0, r.output; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_plan_says_whose_kernels_it_describes():
    shown = plan(*OVERRIDES).output
    assert "step time: " in shown
    assert "with the kernels of megalaunch, eager" in shown
    compiled = plan(*OVERRIDES, "train.compile=true").output
    assert "with the kernels of megalaunch, compiled" in compiled
    assert "torch.compile of each block" in compiled
    assumed = plan(*OVERRIDES, "--assumptions").output
    assert "values moved per inner value of SwiGLU" in assumed
    whole = plan(*OVERRIDES, "precision.compute_dtype=fp32", "train.loss_chunks=8").output
    assert "fp32, no tensor cores" in whole
    assert "logits of one of 8 chunks" in whole


def test_what_the_engine_refuses_has_no_speed():
    library = ("precision.compute_dtype=fp8", "precision.fp8.implementation=transformer_engine")
    rows = plan("recipe=mixtral_8x7b", *library, "precision.fp8.recipe=rowwise")
    assert "[fp8.library_recipe]" in rows.output
    assert "not predicted: the engine refuses this run (errors above)" in rows.output
    assert "tokens/s" not in rows.output
    library = "precision.fp8.implementation=transformer_engine"
    compiled = plan("recipe=llama3_8b", "train.compile=true", "precision=fp8", library).output
    assert "[fp8.library_compile]" in compiled
    assert "tokens/s" not in compiled
    refused = plan(*OVERRIDES, "model.attention_backend=flash", "model.attn_logit_softcapping=30", "--json")
    report = json.loads(refused.output)
    assert (report["time"], report["why_no_time"]) == (None, "the engine refuses this run (errors above)")
    assert report["memory"]["total"] > 0


def test_the_experts_of_the_busiest_rank_are_shown():
    overrides = ("recipe=mixtral_8x7b", "parallel.moe_load_imbalance=1.5")
    text = _plain(plan(*overrides).output)
    assert "experts of the busiest rank, with 1.5 x the mean of the tokens" in text
    assert "rows 12,288 per layer and microbatch" in " ".join(text.split())
    report = json.loads(plan(*overrides, "--json").output)
    assert report["experts"]["imbalance"] == 1.5
    assert 0 < report["time"]["of_experts"]["permutation"] < report["time"]["compute"]["memory"]
    assert json.loads(plan(*OVERRIDES, "--json").output)["experts"] is None
