"""`megalaunch generate`: what it prints, and every way in which it refuses."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.cli.text import generate as module
from megalaunch.cli.text.prompts import PromptError, read_prompts
from megalaunch.engine import api
from megalaunch.engine.inference.chat_template import chat_text
from megalaunch.engine.inference.load_model import load_language_model
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with two checkpoints; tests leave it as it is."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def call(*arguments: object):
    return CliRunner().invoke(app, ["generate", *(str(argument) for argument in arguments)])


def test_the_prompt_and_its_continuation_are_printed(run: RunDirectory):
    arguments = (run.root, "--prompt", "the cat", "--max-new-tokens", 12)
    first, second = call(*arguments), call(*arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("the cat")
    assert len(first.stdout) > len("the cat\n")
    assert first.stdout == second.stdout
    assert call(*arguments, "--seed", 5).stdout != first.stdout
    greedy = call(*arguments, "--temperature", 0).stdout
    assert call(*arguments, "--top-k", 1, "--seed", 9).stdout == greedy
    assert call(*arguments, "--top-p", 1e-9, "--seed", 9).stdout == greedy
    assert call(run.checkpoint(20), *arguments[1:]).stdout == first.stdout


def test_text_that_outgrows_the_training_samples_is_announced(run: RunDirectory):
    result = call(run.root, "--prompt", "the cat", "--max-new-tokens", 70)
    assert result.exit_code == 0
    assert "this model was trained on 64 at a time" in result.stderr
    assert "trained on" not in result.stdout


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--max-new-tokens", 200_000], "max_position_embeddings"),
        (["--prompt", "x", "--max-new-tokens", 0], "'--max-new-tokens'"),
        (["--prompt", "x", "--temperature", -1], "'--temperature'"),
        (["--prompt", "x", "--temperature", "nan"], "temperature"),
        (["--prompt", "x", "--top-k", 0], "'--top-k'"),
        (["--prompt", "x", "--top-p", 1.5], "'--top-p'"),
        (["--prompt", "x", "--top-p", 0], "'--top-p': must be over 0 and at most 1, not 0.0"),
        (["--prompt", "x", "--top-p", "nan"], "'--top-p': must be over 0 and at most 1, not nan"),
        (["--prompt", "x", "--seed", -3], "'--seed'"),
        ([], "there is no prompt: give --prompt TEXT"),
        (["--prompt", "x", "--stop", ""], "a stop string is empty"),
        (["--prompt", "x", "--min-p", 2], "'--min-p'"),
        (["--prompt", "x", "--temperature", "nan"], "'--temperature': must be 0 or more, not nan"),
        (["--prompt", "x", "--temperature", -1], "'--temperature': must be 0 or more, not -1.0"),
        (["--prompt", "x", "--repetition-penalty", 0], "'--repetition-penalty': must be over 0, not 0.0"),
        (["--prompt", "x", "--logprobs", 2], "--logprobs needs --json"),
        (["--prompt", "x", "--system", "Be kind."], "--system needs --chat"),
        (["--prompts", "nowhere.txt"], "cannot read the prompts in nowhere.txt: No such file"),
        (["--prompt", "x", "--chat"], "this model came without a chat template"),
    ],
)
def test_options_that_mean_nothing_are_named(run: RunDirectory, options: list[object], reason: str):
    result = call(run.root, *options)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stdout == ""


def test_help_names_the_ranges_that_are_taken():
    text = " ".join(CliRunner().invoke(app, ["generate", "--help"], terminal_width=100).output.split())
    assert "up to this total probability (over 0, at most 1). [default: 1.0]" in text
    assert "Repetition penalty, over 0; above 1, tokens that already occur become less probable. [default: 1.0]" in text


@pytest.mark.parametrize("layout", [[], ["parallel=tp2"]])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--prompt", "x", "--chat"], "leave --chat out and write the prompt as the model was trained on it"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--max-new-tokens", 200_000], "(--max-new-tokens)"),
    ],
)
def test_prompts_are_checked_before_weights_are_loaded(
    run: RunDirectory, options: list[object], reason: str, layout: list[str], monkeypatch: pytest.MonkeyPatch
):
    def loaded(*arguments: object, **more: object) -> None:
        raise AssertionError("weights were loaded, or workers started")

    monkeypatch.setattr("megalaunch.engine.inference.load_model.build_decoder", loaded)
    monkeypatch.setattr("megalaunch.runs.distributed_inference.run_workers", loaded)
    result = call(run.root, *layout, *options)
    assert (result.exit_code, reason in result.stderr) == (2, True), result.output


def test_many_prompts_are_shown_in_turn_and_as_json(run: RunDirectory, tmp_path: Path):
    arguments = (run.root, "--max-new-tokens", 9, "--temperature", 0)
    file = tmp_path / "prompts.txt"
    file.write_text("the dog\n\nthe mat\n")
    many = (*arguments, "--prompt", "the cat sat on", "--prompts", file, "--num-samples", 2, "--batch-size", 4)
    alone = [call(*arguments, "--prompt", prompt).stdout for prompt in ("the cat sat on", "the dog", "the mat")]
    headed = [f"--- prompt {n}, sample {k}\n{text}" for n, text in enumerate(alone, 1) for k in (1, 2)]
    assert call(*many).stdout == call(*many, "--no-stream").stdout == "".join(headed)
    records = [json.loads(line) for line in call(*many, "--json", "--logprobs", 1).stdout.splitlines()]
    assert [record["prompt"] + record["text"] + "\n" for record in records] == [text for text in alone for _ in (1, 2)]
    assert [(record["index"], record["sample"]) for record in records] == [(n, k) for n in range(3) for k in range(2)]
    for record in records:
        assert record["finish_reason"] == ("length" if len(record["tokens"]) == 9 else "end")
        assert [one["id"] for one in record["logprobs"]] == record["tokens"]
        assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in record["logprobs"]), "greedy"
    events = [json.loads(line) for line in call(*many, "--json", "--stream").stdout.splitlines()]
    pieces = [event["delta"] for event in events if (event["index"], event["sample"]) == (1, 0) and "delta" in event]
    assert "".join(pieces) == records[2]["text"]
    assert len(pieces) > 3


def test_chat_goes_through_the_template_that_came_with_the_model(run: RunDirectory, tmp_path: Path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(run.checkpoint(20), folder)
    (folder / "manifest.json").unlink()
    template = "{% for m in messages %}the {{ m.role }} {{ m['content'] }} {% endfor %}{{ eos_token }}on"
    config = folder / "huggingface.tokenizer_config.json"
    model = load_language_model(folder, torch.device("cpu"))

    def asked(text: str, messages: list[dict[str, str]]) -> str:
        config.write_text(json.dumps({"chat_template": text, "eos_token": {"content": "mat"}}))
        return chat_text({"tokenizer_config.json": config}, messages)

    talk = [{"role": "user", "content": "cat"}]
    assert asked(template, talk) == "the user cat maton"
    assert asked("{{ messages[0] | tojson }}{{ range(2) | list }}", talk) == '{"role": "user", "content": "cat"}[0, 1]'
    for program in (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ open('/etc/passwd').read() }}",
        "{% for x in %}",
    ):
        with pytest.raises(ValueError, match="the chat template that came with this model cannot be applied: "):
            asked(program, talk)
    asked(template, talk)
    model = load_language_model(folder, torch.device("cpu"))
    assert model.files["tokenizer_config.json"] == config
    assert api.tokenize_prompts(model, [talk]) == [model.tokenizer.encode("the user cat maton")]


def test_prompts_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"prompt": "a\\nb"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    hi = [{"role": "user", "content": "hi"}]
    assert read_prompts(["c"], str(lines), True, "S")[1:] == [
        [{"role": "system", "content": "S"}, {"role": "user", "content": "a\nb"}],
        [{"role": "system", "content": "S"}, *hi],
    ]
    with pytest.raises(PromptError, match=r'x\.jsonl, line 2 has no text under "prompt"; conversations need --chat'):
        read_prompts([], str(lines), False, None)
    lines.write_text("{]\n")
    with pytest.raises(PromptError, match=r"x\.jsonl, line 1 is not valid JSON"):
        read_prompts([], str(lines), False, None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("one\r\n\nzwölf\n".encode())))
    assert read_prompts([], "-", False, None) == ["one", "zwölf"]
    lines.write_bytes(b"\xff")
    with pytest.raises(PromptError, match="are not UTF-8: byte 0 is invalid"):
        read_prompts([], str(lines), False, None)
    lines.write_text("\n")
    with pytest.raises(PromptError, match="has no lines: give --prompt TEXT"):
        read_prompts([], str(lines), False, None)


def test_what_is_no_run(tmp_path: Path):
    result = call(tmp_path / "nowhere", "--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {tmp_path / 'nowhere'} is not a directory: "
        "name a run, one of its checkpoints/step_<number> or a Hugging Face folder\n"
    )
    result = call(tmp_path, "--prompt", "x")
    assert result.exit_code == 2
    assert f"{tmp_path} has neither a checkpoint nor a run: name a run directory" in result.stderr


def test_a_run_without_a_valid_checkpoint(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=())
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 4
    assert result.stderr == f"error: {run.checkpoints} has no valid checkpoint (the run has not saved one yet)\n"
    run = make_run(tmp_path / "other", steps=(7,))
    (run.checkpoint(7) / "tensors.json").write_text("{}")
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 4
    assert f"{run.checkpoint(7)} is passed over: tensors.json: has 2 bytes instead of" in result.stderr
    assert f"{run.checkpoints} has no valid checkpoint (all of them are damaged: step_00000007)" in result.stderr
    result = call(run.checkpoint(7), "--prompt", "x")
    assert result.exit_code == 4
    assert "is damaged: tensors.json" in result.stderr


def test_without_torch_the_extra_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 2
    assert "pip install 'megalaunch[train]'" in result.stderr


@pytest.mark.slow
def test_a_reader_that_leaves_and_an_encoding_that_lacks_characters(run: RunDirectory):
    command = [sys.executable, "-m", "megalaunch", "generate", str(run.root), "--prompt", "käse", "--temperature", "0"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"k?se")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(timeout=60)
    assert b"Traceback" not in stderr
