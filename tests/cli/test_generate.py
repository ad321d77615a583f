"""`megalaunch generate`: what it prints, and every way in which it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli import generate as module
from megalaunch.cli.app import app
from megalaunch.rundir.paths import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run with two checkpoints; tests leave it as it is."""
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


def call(*words: object):
    return CliRunner().invoke(app, ["generate", *(str(word) for word in words)])


def test_the_prompt_and_its_continuation_are_printed(run: RunDirectory):
    words = (run.root, "--prompt", "the cat", "--max-new-tokens", 12)
    first, second = call(*words), call(*words)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("the cat")
    assert len(first.stdout) > len("the cat\n")
    assert first.stdout == second.stdout
    assert call(*words, "--seed", 5).stdout != first.stdout
    greedy = call(*words, "--temperature", 0).stdout
    assert call(*words, "--top-k", 1, "--seed", 9).stdout == greedy
    assert call(*words, "--top-p", 1e-9, "--seed", 9).stdout == greedy
    assert call(run.checkpoint(20), *words[1:]).stdout == first.stdout


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
        (["--prompt", "x", "--top-p", 0], "top-p must be over 0 and at most 1, not 0.0"),
        (["--prompt", "x", "--seed", -3], "'--seed'"),
        ([], "'--prompt'"),
    ],
)
def test_options_that_mean_nothing_are_named(run: RunDirectory, options: list[object], reason: str):
    result = call(run.root, *options)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stdout == ""


def test_what_is_no_run(tmp_path: Path):
    result = call(tmp_path / "nowhere", "--prompt", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"{tmp_path / 'nowhere'} is no directory; "
        "give a run, one of its checkpoints/step_<number> or a Hugging Face folder\n"
    )
    result = call(tmp_path, "--prompt", "x")
    assert result.exit_code == 2
    assert f"{tmp_path} has neither a checkpoint nor a run in it; give a run directory" in result.stderr


def test_a_run_without_a_valid_checkpoint(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=())
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 4
    assert result.stderr == f"{run.checkpoints} holds no valid checkpoint (the run has not saved one yet)\n"
    run = make_run(tmp_path / "other", steps=(7,))
    (run.checkpoint(7) / "tensors.json").write_text("{}")
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 4
    assert f"{run.checkpoint(7)} is passed over: tensors.json: has 2 bytes instead of" in result.stderr
    assert f"{run.checkpoints} holds no valid checkpoint (all of them are damaged: step_00000007)" in result.stderr
    result = call(run.checkpoint(7), "--prompt", "x")
    assert result.exit_code == 4
    assert "cannot be trusted: tensors.json" in result.stderr


def test_without_torch_the_extra_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    result = call(run.root, "--prompt", "x")
    assert result.exit_code == 2
    assert "pip install 'megalaunch[train]'" in result.stderr


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
