"""A tokenizer's folder that comes with code: the tokenizer is read, and the code is not run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from tiny_run import tiny_tokenizer
from typer.testing import CliRunner

from megalaunch.cli.app import app

CODE = "open({!r}, 'w').close()\nclass OwnTokenizer: pass\n"
CONFIG = {
    "tokenizer_class": "OwnTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizer"]},
    "trust_remote_code": True,
}


@pytest.fixture
def marker(tmp_path) -> Path:
    """Exists once the code has run."""
    return tmp_path / "it ran"


@pytest.fixture
def folder(tmp_path, marker) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tiny_tokenizer(folder)[1].rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenization_own", "__init__", "tokenizer", "setup", "sitecustomize"):
        (folder / f"{name}.py").write_text(CODE.format(str(marker)))
    return folder


def test_the_code_of_a_tokenizer_is_not_run(folder, marker, tmp_path, monkeypatch):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the cat"}\n')
    monkeypatch.chdir(folder)  # where `import tokenization_own` would find it
    for arguments in (
        ["tokenizer", "inspect", str(folder), "--text", "the cat"],
        ["preprocess", str(text), "--tokenizer", str(folder), "--output-prefix", str(tmp_path / "out")],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert not marker.exists()
    assert (tmp_path / "out_text_document.bin").stat().st_size > 0


def test_it_would_have_left_a_mark(folder, marker):
    runpy.run_path(str(folder / "tokenization_own.py"))
    assert marker.exists()
