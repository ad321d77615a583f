"""`megalaunch evaluate`: the loss of a run's own validation, that of transformers, and what is made of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from family_variants import VOCABULARY, make
from looped_run import run_loop, ten_steps
from made_models import write_random_folder
from oracle import VOCABULARY as RUN_VOCABULARY
from token_files import write_letters, write_tokens
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory


def evaluated(*arguments: object) -> list[dict]:
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_loss_is_that_of_the_runs_own_validation(tmp_path):
    spec = ten_steps(tmp_path)
    run = RunDirectory(tmp_path / "run")
    write_letters(run.tokenizer, RUN_VOCABULARY)
    spec = replace(spec, tokenizer=replace(spec.tokenizer, path=str(run.tokenizer)))
    run_loop(spec, run.root)
    last = [line["validation_loss"] for line in read_lines(run.metrics) if "validation_loss" in line][-1]
    (found,) = evaluated(run.root, "--data", spec.data.validation_prefix)
    assert found["loss"] == pytest.approx(last, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bytes"] > 0
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])


def test_the_loss_is_that_of_transformers(tmp_path):
    pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    theirs = make("gemma2", tmp_path / "hf")
    write_letters(tmp_path / "hf" / "tokenizer.json", VOCABULARY)
    tokens = np.random.default_rng(1).integers(1, VOCABULARY, 101)
    one = write_tokens(tmp_path / "one", [tokens[:60].tolist(), tokens[60:].tolist()])
    lines = tmp_path / "two.jsonl"
    lines.write_text(json.dumps({"body": "ABBA"}) + "\n" + json.dumps({"body": "CAB"}) + "\n")
    arguments = ("--data", one, "--data", lines, "--sequence-length", 20, "--json-key", "body")
    first, second = evaluated(tmp_path / "hf", *arguments, "--batch-size", 3)
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        logits = theirs(ids[:100].view(5, 20)).logits
        assert first["loss"] == pytest.approx(float(F.cross_entropy(logits.flatten(0, 1), ids[1:])), abs=1e-4)
        tokens = torch.tensor([[17, 18, 18, 17, 0, 19, 17, 18, 0]])
        logits = theirs(tokens[:, :-1]).logits
        assert second["loss"] == pytest.approx(float(F.cross_entropy(logits[0], tokens[0, 1:])), abs=1e-4)
    assert (first["tokens"], second["tokens"]) == (100, 8)
    assert second["bytes"] == 6, "the first letter is not predicted, and an end of a document is no text"
    shown = CliRunner().invoke(app, ["evaluate", str(tmp_path / "hf"), "--data", str(one), "--sequence-length", "20"])
    assert f"{first['loss']:.4f}" in shown.stdout


def test_what_cannot_be_evaluated(tmp_path, monkeypatch):
    here = find_spec
    monkeypatch.setattr(
        "megalaunch.cli.text.evaluate.find_spec", lambda name: None if name == "lm_eval" else here(name)
    )
    shape = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": VOCABULARY}
    write_random_folder(tmp_path / "hf", torch.float32, **shape)
    write_letters(tmp_path / "hf" / "tokenizer.json", VOCABULARY)
    for arguments, code, reason in [
        (["--data", tmp_path / "nowhere"], 3, "nowhere"),
        (["--data", write_tokens(tmp_path / "short", [[5]])], 3, "it holds no token to predict"),
        (["--data", tmp_path / "short", "--sequence-length", 129], 2, "longer than the 128 that the model is made for"),
        (["--data", write_tokens(tmp_path / "strange", [[5, 99]])], 3, "the vocabulary has 53 entries"),
        ([], 2, "with --data, or a task of lm-eval with --task"),
        (
            ["parallel=tp2", "--task", "any"],
            2,
            "lm-eval tasks run in one process: omit parallel=tp2 or --task",
        ),
        (["--task", "any"], 2, "pip install 'megalaunch[lm-eval]'"),
        (["--task", "any", "--include-path", tmp_path / "no"], 2, "no is not a directory"),
    ]:
        result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "hf"), *map(str, arguments)])
        assert (result.exit_code, reason in result.stderr) == (code, True), result.output
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "no"), "--data", "x"])
    assert (result.exit_code, "is not a directory" in result.stderr) == (2, True)
