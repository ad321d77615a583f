"""A prefix or an output without a file name is refused by each command that takes one, before any work."""

import subprocess
import sys

import pytest
from token_files import sentences, small_tokenizer, write_jsonl

TOKENS = "is a folder; give a prefix such as FOLDER/tokens"
TOKENIZER = "is a folder; give a file such as FOLDER/tokenizer.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, a tokenizer and another folder."""
    folder = tmp_path_factory.mktemp("names")
    small_tokenizer(folder / "tokenizer.json")
    write_jsonl(folder / "in.jsonl", sentences(30))
    (folder / "inner").mkdir()
    return folder


def refused(folder, *arguments: str) -> str:
    """What a command says that ends with the exit code of wrong usage, and writes nothing."""
    before = sorted(folder.parent.rglob("*"))
    program = "from megalaunch.cli.main import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder / "inner", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert sorted(folder.parent.rglob("*")) == before
    return " ".join(done.stderr.split())


@pytest.mark.parametrize("name", ["", ".", "/", "..", "x/", "../inner/.", "x/.."])
def test_preprocess(folder, name):
    given = ("../in.jsonl", "--tokenizer", "../tokenizer.json")
    said = refused(folder, "preprocess", *given, "--output-prefix", name)
    assert f"'--output-prefix': {name or 'an empty name'} {TOKENS}" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("merge", "../a", "--output-prefix", "."),
        ("split", "../a", "--parts", "2", "--output-prefix", "x/"),
        ("split", ".", "--parts", "2", "--output-prefix", "../b"),
        ("inspect", "."),
        ("inspect", ""),
        ("verify", "/"),
        ("verify", ".."),
    ],
)
def test_token_files(folder, arguments):
    assert TOKENS in refused(folder, "data", *arguments)


@pytest.mark.parametrize("name", ["", ".", "../inner", "x/"])
def test_a_trained_tokenizer(folder, name):
    said = refused(folder, "tokenizer", "train", "../in.jsonl", "--vocab-size", "300", "--output", name)
    assert f"'--output': {name or 'an empty name'} {TOKENIZER}" in said
