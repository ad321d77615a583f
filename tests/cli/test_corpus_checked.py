"""A corpus that is not there, is empty or is no file is refused before anything starts, by each command that checks."""

import os

import pytest
from slow_cases import slow_but
from typer.testing import CliRunner

from megalaunch.cli.app import app

COMMANDS = [("validate-config",), ("train", "--dry-run"), ("sweep", "--dry-run")]


def invoke(command, *overrides):
    swept = ("optimizer.lr=0.1,0.2",) if command[0] == "sweep" else ()
    return CliRunner().invoke(app, [*command, "recipe=tiny", "platform=cpu", "parallel=dp1", *overrides, *swept])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("text\n")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / ".hidden").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text\n")
    (tmp_path / "splits").mkdir()
    for split in ("a", "b"):
        (tmp_path / "splits" / f"{split}-00000-of-00001.jsonl").write_text('{"text": "x"}\n')
    return tmp_path


ABSENT = [
    ("missing.txt", "missing.txt: no such corpus"),
    ("empty.txt", "empty.txt: it is empty (1 file without a byte)"),
    ("/dev/zero", "/dev/zero: it is neither a regular file nor a directory"),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("source", "said"),
    slow_but(ABSENT, ABSENT[0]),
)
def test_it_is_refused(command, source, said):
    result = invoke(command, f"data.corpus={source}")
    assert result.exit_code == (3 if command[0] == "train" else 2)  # a run that only lacks its data says so by its code
    assert said in result.output
    assert "data.corpus_exists" in result.output


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hollow", "hollow: the folder holds no readable files"),
        ("*.csv", "*.csv: no file matches this corpus"),
        ("pipe", "pipe: it is neither a regular file nor a directory"),
        ("splits", "splits: it holds several splits, none of which is called train"),
        ("'~nobody_at_all/x'", "~nobody_at_all/x: Could not determine home directory"),
    ],
)
@pytest.mark.parametrize("key", slow_but(["data.corpus", "data.sft_data"], "data.corpus"))
def test_whatever_cannot_be_read_is_refused(key, source, said):
    result = invoke(("validate-config",), "data.corpus=null", f"{key}={source}")
    assert (result.exit_code, said in result.output) == (2, True), result.output


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("source", slow_but(["good.txt", "*.txt", "texts", "python-stdlib"], "good.txt", "texts"))
def test_what_is_there_passes(command, source):
    result = invoke(command, f"data.corpus={source}")
    assert result.exit_code == 0, result.output


def test_what_is_left_out_of_a_dataset_folder_is_noted(folder):
    (folder / "splits" / "train.jsonl").write_text('{"text": "x"}\n')
    result = invoke(("validate-config",), "data.corpus=splits")
    assert "splits: read split train (1 file); left out split a (splits/a-00000-of-00001.jsonl)" in result.output


def test_a_tokenizer_that_never_ends():
    result = CliRunner().invoke(app, ["tokenizer", "inspect", "/dev/zero"])
    assert (result.exit_code, "/dev/zero: it is neither a regular file nor a directory" in result.output) == (3, True)
