"""`megalaunch plan --search` as a user calls it: the table, JSON, other numbers of devices, and what it refuses."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from megalaunch.cli.app import app


def invoke(*overrides: str):
    return CliRunner().invoke(app, ["plan", "--search", *overrides])


def test_the_table_names_the_fastest_and_the_runs_own_place():
    result = invoke("recipe=llama3_8b")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["tokens/s/device", "MFU", "GiB"]
    assert sum("this run's)" in line for line in lines) == 1
    assert any(line.startswith("the fastest:   parallel=") for line in lines)
    assert any(line.startswith("this run's layout is number ") for line in lines)
    assert any("dropped: memory.fits" in line for line in lines)


def test_json_is_one_object_whose_overrides_are_a_valid_run():
    result = invoke("--json", "--devices", "16", "recipe=llama3_8b")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["devices"] == 16
    assert data["considered"] == data["valid"] + sum(data["dropped"].values())
    speeds = [layout["tokens_per_second_per_device"] for layout in data["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(layout["headroom_bytes"] >= 0 for layout in data["layouts"])
    overrides = ["recipe=llama3_8b", *data["layouts"][0]["overrides"]]
    again = CliRunner().invoke(app, ["plan", "--json", *overrides])
    assert again.exit_code == 0, again.output


def test_what_cannot_be_searched_is_refused_with_the_reason():
    odd = invoke("--devices", "12", "recipe=llama3_8b")
    assert odd.exit_code == 2
    assert "nodes of 8" in odd.stderr
    unknown = invoke("recipe=llama3_8b", "platform=cpu")
    assert unknown.exit_code == 2
    assert "platform=h100" in unknown.stderr
    partly = invoke("recipe=llama3_8b", "platform=mtt_s5000")
    assert partly.exit_code == 2
    assert "no predicted speed: mtt_s5000 has no known peak in bf16" in partly.stderr


def test_a_model_that_fits_nowhere_has_no_best():
    result = invoke("--devices", "1", "recipe=llama31_405b", "batch.global_batch_size=1")
    assert result.exit_code == 2
    assert "0 are valid and fit" in result.stdout
    assert "dropped: memory.fits" in result.stdout


def test_what_the_engine_refuses_has_no_place_and_no_speed():
    shown = invoke("recipe=llama3_8b", "train.cuda_graphs=true", "parallel=cp2zero3")
    assert shown.exit_code == 0, shown.output
    rows = [line for line in shown.stdout.splitlines() if " dp" in line]
    assert rows
    assert not [row for row in rows if "zero3" in row or "cp" in row or "pp" in row]
    assert "this run's)" not in shown.stdout
    own = "not among them: it violates the rule train.cuda_graphs_layout: attention of context parallelism (cp=2)"
    assert own in shown.stdout
    none = invoke("recipe=mixtral_8x7b", "train.cuda_graphs=true")
    assert none.exit_code == 2
    assert "refuses every layout" in none.stderr
    assert "[train.cuda_graphs_model]" in none.stderr
    assert "tokens/s" not in none.output
