"""`megalaunch plan --deep` as a user runs it: the table, the JSON, and every refusal."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from paths import ROOT
from typer.testing import CliRunner

from megalaunch.cli.app import app

PAGE = (ROOT / "docs/deep-plan.md").read_text(encoding="utf-8")
SMALL = ("recipe=llama_tiny", "data.mock=true", "model.vocab_size=512", "platform=h100", "batch.global_batch_size=16")
LAYOUT = ("parallel=tp2pp2sp", "cluster.devices_per_node=8")

run = CliRunner()


def deep(*overrides):
    return run.invoke(app, ["plan", "--deep", *overrides])


def test_a_rank_s_bytes_and_collectives():
    result = deep(*SMALL, *LAYOUT, "--rank", "7")
    assert result.exit_code == 0, result.output
    assert "rank 7 of 8 (pp1 dp1 tp1)" in result.output
    assert re.search(r"(?m)^  total +[\d.]+ .B +[\d.]+ .B +[+-][\d.]+%$", result.output)
    assert re.search(r"(?m)^  backward +send +pp +2 +4 +[\d.]+ kB$", result.output)
    assert re.search(r"(?m)^  backward +reduce-scatter +dp +2 +", result.output)


def test_json():
    result = deep(*SMALL, *LAYOUT, "--json")
    report = json.loads(result.output)
    assert (report["world"], report["operators"], report["microbatches"]) == (8, "gpu", 4)
    memory = report["memory"]
    assert memory["total"] == sum(memory["bytes"].values()) > 0
    assert set(memory["bytes"]) == {*memory["planned"], "collectives"}
    assert {one["axis"] for one in report["collectives"]} == {"tp", "dp", "pp", "world"}
    assert all(one["count"] > 0 and one["bytes"] > 0 for one in report["collectives"])


def test_one_rank_sends_nothing():
    result = deep("recipe=llama_tiny", "data.mock=true", "model.vocab_size=512", "parallel=dp1", "platform=cpu")
    assert result.exit_code == 0, result.output
    assert "CPU operators" in result.output
    assert "none: there is one rank" in result.output


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--rank", "8"), "error: --rank 8 is outside the world of 8\nfix:  --rank 0 to 7"),
        (
            ("precision=fp8", "precision.fp8.implementation=transformer_engine", "model.head_dim=16"),
            "a deep plan simulates the engine's own matmuls, not Transformer Engine's\n"
            "fix:  precision.fp8.implementation=native",
        ),
        (
            ("parallel.cp=2", "model.attention_backend=te", "model.head_dim=16"),
            "a deep plan simulates the engine's own ring of context parallelism, not Transformer Engine's\n"
            "fix:  model.attention_backend=auto",
        ),
        (("parallel.tp=3",), "[parallel."),
        (("--search",), "it cannot be combined with --search, --tokens or --assumptions"),
    ],
)
def test_what_cannot_be_is_refused(overrides, said):
    result = deep(*SMALL, *LAYOUT, *overrides)
    assert result.exit_code == 2
    assert said in result.stderr


def test_an_open_vocabulary_is_named():
    result = deep("recipe=tiny", "parallel=dp1", "data.train_prefix=tokens")
    assert result.exit_code == 2
    assert "give it (model.vocab_size=N) or the data" in result.stderr


def test_a_rank_belongs_to_deep():
    result = run.invoke(app, ["plan", *SMALL, "--rank", "1"])
    message = "error: --rank needs --deep; a plan reports the rank with the highest memory\n"
    assert (result.exit_code, result.stderr) == (2, message)


def test_without_torch_the_extra_is_named(monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr("megalaunch.cli.plan.deep.find_spec", lambda name: None if name == "torch" else own(name))
    result = deep(*SMALL)
    assert result.exit_code == 2
    assert "plan --deep needs torch" in result.stderr
    assert "pip install 'megalaunch[train]'" in result.stderr


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints():
    shown = re.search(r"^\$ megalaunch plan --deep (.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert shown is not None
    result = deep(*shown[1].split())
    assert result.exit_code == 0, result.output
    plain = [re.sub(r"(?m)^(  run +).*$", r"\1HERE", text.rstrip()) for text in (result.output, shown[2])]
    assert plain[0] == plain[1]
