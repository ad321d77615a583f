"""`megalaunch explain`: what every `why:` line names, from a file that comes with the package."""

import shlex

import pytest
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.cli.reference.explain import PAGE, read_rules
from megalaunch.plan.findings import OUTSIDE_RULES
from megalaunch.plan.rules.registry import RULES

run = CliRunner()


def test_every_rule_has_its_page_in_the_package():
    pages = read_rules(PAGE.read_text(encoding="utf-8"))
    assert set(pages) == {*RULES, *OUTSIDE_RULES}
    assert "megalaunch" in PAGE.parts
    for rule, text in pages.items():
        sentence = RULES[rule].sentence if rule in RULES else OUTSIDE_RULES[rule][0]
        assert " ".join(text.split()).startswith(sentence), rule
        assert "<a id" not in text


def test_the_why_line_is_a_command_that_explains():
    result = run.invoke(app, ["validate-config", "recipe=llama3_70b", "parallel=tp3pp7"])
    (line,) = [line for line in result.output.splitlines() if "parallel.heads_by_tp" in line and "why:" in line]
    explained = run.invoke(app, shlex.split(line.removeprefix("  why:"))[1:])
    assert explained.exit_code == 0
    assert explained.output.startswith("parallel.heads_by_tp\n\nnum_attention_heads is divisible by tp.")
    assert "$ megalaunch validate-config " in explained.output
    assert "fix:  parallel.tp=" in explained.output


@pytest.mark.parametrize("name", ["heads_by_tp", "parallel-heads_by_tp"])
def test_a_rule_by_other_forms_of_its_name(name):
    assert run.invoke(app, ["explain", name]).output.startswith("parallel.heads_by_tp\n")


def test_an_empty_name_names_no_rule():
    result = run.invoke(app, ["explain", ""])
    assert (result.exit_code, "there is no rule, key, section, exit code or event ''" in result.output) == (2, True)


def test_keys_and_sections():
    text = run.invoke(app, ["explain", "optimizer.lr"]).output
    assert text == "optimizer.lr\n  Peak learning rate.\n  takes: a number; default: 0.0003\n"
    assert "optimizer.beta2\n" in run.invoke(app, ["explain", "optimizer"]).output


def test_a_config_group_lists_its_options():
    text = run.invoke(app, ["explain", "model"]).output
    assert text.startswith("model=NAME, with NAME one of\n  deepseek_tiny, ")
    assert "llama3_8b," in text.partition("model.name")[0]
    assert run.invoke(app, ["explain", "train"]).output.startswith("train.")


def test_what_there_is_none_of():
    result = run.invoke(app, ["explain", "parallel.hads_by_tp"])
    assert (result.exit_code, "did you mean 'parallel.heads_by_tp'?" in result.output) == (2, True)
    assert "parallel.world\n" in run.invoke(app, ["explain"]).output


def test_exit_codes_and_events():
    text = run.invoke(app, ["explain", "75"]).output
    assert text.startswith("exit code 75: stopped by a signal; the run can be resumed\n")
    assert "  next    run the same command to resume\n" in text
    text = run.invoke(app, ["explain", "restart"]).output
    assert text.startswith("restart: an event in events.jsonl\n\n  written by  the launcher, or the agent of node 0 ")
    assert "  pause_seconds  seconds that the launcher waits before it\n" in text
    both = run.invoke(app, ["explain", "checkpoint"]).output  # a section and an event
    assert "checkpoint.load_pretrained\n" in both
    assert "checkpoint: an event" in both
    assert run.invoke(app, ["explain", "9"]).exit_code == 2
