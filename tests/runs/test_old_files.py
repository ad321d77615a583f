"""Files of older versions are read: the promise of docs/compatibility.md."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from paths import TESTS
from training import train_tiny
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.spec_file import read_spec

VERSIONS = sorted((TESTS / "support/old_files").glob("v*"))
SAVED, LAST = 3, 6
TOKENS = "f058e475b94318c2d97f69e640f571b55a0d9d3f5efa04803edebbac13088230"  # sha256 of the .bin


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def old(request, tmp_path: Path) -> Path:
    """A copy, since a reader may write caches beside what it reads."""
    return Path(shutil.copytree(request.param, tmp_path / request.param.name))


def test_the_spec_says_what_it_said(old):
    spec = read_spec(RunDirectory(old / "run").spec)
    assert (spec.model.hidden_size, spec.model.num_layers, spec.model.vocab_size) == (8, 2, 300)
    assert (spec.optimizer.lr, spec.train.steps, spec.batch.global_batch_size) == (1e-2, LAST, 8)
    assert spec.precision.compute_dtype == "fp32"


def test_the_token_files_hold_the_same_tokens(old):
    data = IndexedTokens(old / "tokens/tiny_text_document")
    assert (data.num_documents, data.num_tokens, data.dtype) == (4, 1599, np.uint16)
    tokens = [data.tokens(document) for document in range(4)]
    assert all(document[-1] == 0 for document in tokens)  # the end token of each document
    assert hashlib.sha256(np.concatenate(tokens).astype("<u2").tobytes()).hexdigest() == TOKENS


def test_the_commands_read_the_run(old):
    for arguments in (
        ["checkpoint", "verify", old / "run/checkpoints/step_00000003"],
        ["checkpoint", "inspect", old / "run/checkpoints/step_00000003"],
        ["data", "verify", old / "tokens/tiny_text_document"],
        ["runs", "list", old],
    ):
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_training_continues_as_it_did_under_another_layout(old, tmp_path, layout):
    """Weights, moments, schedule and data order: the losses are those that the old version computed itself."""
    run, checkpoint = RunDirectory(old / "run"), old / "run/checkpoints/step_00000003"
    shape = ("model.hidden_size=8", "model.ffn_hidden_size=16", "model.num_attention_heads=2")
    code, out, err = train_tiny(
        tmp_path,
        *(*shape, "model.num_query_groups=1", "train.steps=6", "checkpoint.interval=3", "train.sample_prompt=null"),
        *("data.corpus=null", f"data.train_prefix={old / 'tokens/tiny_text_document'}"),
        *(f"tokenizer.path={checkpoint / 'tokenizer.json'}", f"parallel={layout}"),
        *("--from", f"{run.root}@{SAVED}"),
    )
    assert code == 0, out + err
    own, continued = losses(run), losses(RunDirectory(tmp_path / "run"))
    assert set(continued) == set(range(SAVED + 1, LAST + 1))
    assert continued == pytest.approx({step: own[step] for step in continued}, rel=1e-5)


def losses(run: RunDirectory) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_lines(run.metrics) if "loss" in record}
