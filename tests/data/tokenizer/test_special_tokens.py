"""Prompts and evaluated texts begin as the tokenizer's post-processor has them begin, held to transformers."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import make_run
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.engine.inference.jobs import EvaluateJob, GenerateJob, read_job, write_job
from megalaunch.engine.inference.load_model import open_source
from megalaunch.engine.inference.perplexity import _write
from megalaunch.engine.inference.request import GenerationRequest, tokenize_prompts
from megalaunch.rundir.checkpoint.manifest import FileRecord, manifest_text
from megalaunch.rundir.paths import RunDirectory

from tiny_run import tiny_tokenizer  # isort: skip

TEXT = "the cat"


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """A checkpoint whose tokenizer puts its token 0 before every text, as Llama's does."""
    directory = make_run(tmp_path / "run", (10,))
    path = directory.checkpoint(10) / "tokenizer.json"
    content = json.loads(path.read_text())
    first = next(token for token, number in content["model"]["vocab"].items() if number == 0)
    bos = {"id": first, "ids": [0], "tokens": [first]}
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {first: bos},
    }
    path.write_text(json.dumps(content))
    manifest = directory.checkpoint(10) / "manifest.json"
    return _trusted(directory, manifest, path)


def _trusted(directory: RunDirectory, manifest: Path, changed: Path) -> RunDirectory:
    """The manifest vouches for the changed file."""
    files = json.loads(manifest.read_text())["files"]
    content = changed.read_bytes()
    files[changed.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(manifest_text(FileRecord(name, **record) for name, record in files.items()))
    return directory


def test_a_prompt_begins_as_transformers_begins_it(run):
    transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
    source = open_source(run.root)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(run.checkpoint(10) / "tokenizer.json"))
    assert tokenize_prompts(source, [TEXT]) == [theirs(TEXT)["input_ids"]]
    assert tokenize_prompts(source, [TEXT])[0][0] == 0
    plain = tokenize_prompts(replace(source, add_special_tokens=False), [TEXT])
    assert plain == [theirs(TEXT, add_special_tokens=False)["input_ids"]] == [source.tokenizer.encode(TEXT)]


def test_a_tokenizer_without_one_adds_nothing(tmp_path):
    source = open_source(make_run(tmp_path / "run", (10,)).root)
    assert tokenize_prompts(source, [TEXT]) == [tiny_tokenizer(tmp_path)[0].encode(TEXT)]


def test_the_switch_of_the_command(run):
    """What a token follows decides over its probability."""
    arguments = ["generate", str(run.root), "--prompt", TEXT, "--max-new-tokens", "1", "--json", "--logprobs", "0"]
    results = [CliRunner().invoke(app, [*arguments, "--temperature", "0", *more]) for more in ([], ["--no-bos"])]
    first, second = (json.loads(result.output.splitlines()[-1])["logprobs"][0]["logprob"] for result in results)
    assert abs(first - second) > 1e-6


def test_evaluated_texts_have_it_too(run, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": TEXT}) + "\n")
    source = open_source(run.root)
    end = [] if source.tokenizer.eod_id is None else [source.tokenizer.eod_id]
    for number, model in enumerate((source, replace(source, add_special_tokens=False))):
        _write(model, str(text), tmp_path / str(number), "text", lambda: None)
        expected = ([] if number else [0]) + source.tokenizer.encode(TEXT) + end
        assert IndexedTokens(tmp_path / str(number)).tokens(0).tolist() == expected
    scored = [
        CliRunner().invoke(app, ["evaluate", str(run.root), "--data", str(text), "--json", *more])
        for more in ([], ["--no-bos"])
    ]
    counts = [json.loads(result.stdout.splitlines()[-1])["tokens"] for result in scored]
    assert counts[0] == counts[1] + 1


def test_workers_are_told(tmp_path):
    for job in (
        GenerateJob((TEXT,), GenerationRequest(), no_bos=True),
        EvaluateJob((TEXT,), 8, 1, "text", no_bos=True),
    ):
        write_job(RunDirectory(tmp_path), job)
        assert read_job(RunDirectory(tmp_path)) == job
