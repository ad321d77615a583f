"""`megalaunch preprocess` as a user meets it: what it prints, writes, and refuses with which exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.indexed_dataset.dataset import IndexedTokens


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return small_tokenizer(tmp_path / "tokenizer.json")


def command(*arguments: object) -> list[str]:
    program = "from megalaunch.cli.main import main; main()"
    return [sys.executable, "-c", program, "preprocess", *map(str, arguments)]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)


def test_help_names_every_option():
    done = run("--help")
    assert done.returncode == 0
    for option in ("--output-prefix", "--tokenizer", "--workers", "--append-eod", "--json-key", "--format"):
        assert option in done.stdout
    assert "--on-bad-record" in done.stdout


def test_a_url_as_output_is_refused(tmp_path, tokenizer):
    write_jsonl(tmp_path / "in.jsonl", sentences(3))
    where = ["--output-prefix", "s3://key:secret@bucket/x"]
    done = subprocess.run(
        command("in.jsonl", "--tokenizer", tokenizer, *where), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "token files are not written to s3:// URLs. Give a path " in done.stderr
    assert "secret" not in done.stderr
    assert not (tmp_path / "s3:").exists()


def test_jsonl_by_the_usual_command(tmp_path, tokenizer):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    path = write_jsonl(tmp_path / "in.jsonl", sentences(30))
    done = run(path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "2", "--append-eod")
    assert done.returncode == 0, done.stderr
    read = IndexedTokens(tmp_path / "out_text_document")
    assert read.num_documents == 30
    assert all(read.tokens(number)[-1] == 0 for number in range(30))
    first, second = done.stdout.splitlines()
    assert first.startswith(f"30 documents, {read.num_tokens:,} tokens, ")
    assert second == f"{tmp_path}/out_text_document.bin, .idx; report: {tmp_path}/out_text_document.json"
    assert done.stderr == ""
    assert json.loads((tmp_path / "out_text_document.json").read_text())["settings"]["workers"] == 2


def test_a_bad_record_stops_with_exit_code_3(tmp_path, tokenizer):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n{"body": "bad"}\n')
    done = run(path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "1")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr == (
        f'{path}, line 2: the record has no key "text". Its keys are body: name the one with the text '
        "(data.json_key, or --json-key). To leave such records out: --on-bad-record skip.\n"
    )
    assert not list(tmp_path.glob("*out*"))


def test_a_bad_record_is_left_out_when_asked(tmp_path, tokenizer):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n{"body": "bad"}\n')
    arguments = (
        "--output-prefix",
        tmp_path / "out",
        "--tokenizer",
        tokenizer,
        "--workers",
        "1",
        "--on-bad-record",
        "skip",
    )
    done = run(path, *arguments)
    assert done.returncode == 0
    assert f'1 of 2 records left out, the first: {path}, line 2: the record has no key "text"' in done.stdout


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--format", "xml"], ["--on-bad-record", "cry"]])
def test_a_wrong_option_is_exit_code_2(tmp_path, tokenizer, arguments):
    done = run(tmp_path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_no_torch_is_needed(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", ["x"])
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('torch is not for this wing')")
    environment = {**os.environ, "PYTHONPATH": str(blocked)}
    arguments = command(path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "2")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_under_the_final_names(tmp_path, tokenizer):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    path = write_jsonl(tmp_path / "in.jsonl", [" ".join(sentences(100))] * 60_000)
    arguments = command(path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "2")
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    unfinished = tmp_path / ".out.preprocess" / "0.bin"
    while not (unfinished.exists() and unfinished.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (output, errors) == ("", "interrupted; no file has its final name yet; continue with --resume\n")
    assert process.returncode == 130
    assert not list(tmp_path.glob("out*"))
