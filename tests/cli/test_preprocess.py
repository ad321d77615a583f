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


def identity(file: Path) -> tuple[int, int, int]:
    """Return what changes if a file is replaced or written, and not if it is only read."""
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def test_a_finished_run_is_skipped_and_others_are_replaced_only_if_asked(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(20))
    usual = (path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "1")
    files = [tmp_path / f"out_text_document{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert run(*usual).returncode == 0
    first = [identity(file) for file in files]
    for more in (
        (),
        ("--resume",),
        ("--overwrite",),
        ("--workers", "2"),
        ("--shards", "2"),
        ("--shards", "2", "--merge"),
    ):
        again = run(*usual, *more)
        said = f"{tmp_path}/out: already complete, of the same inputs, tokenizer and settings; nothing is written\n"
        assert (again.returncode, again.stdout, again.stderr) == (0, said, ""), more
    assert [identity(file) for file in files] == first

    for more in (("--append-eod",), ("--append-eod", "--resume"), ("--append-eod", "--shards", "2", "--shard", "0")):
        other = run(*usual, *more)
        assert (other.returncode, other.stdout) == (3, "")
        assert (
            f"{files[0]}: it exists, and was made of other settings. Give another --output-prefix, or " in other.stderr
        )
    assert [identity(file) for file in files] == first
    assert run(*usual, "--append-eod", "--overwrite").returncode == 0
    assert IndexedTokens(tmp_path / "out_text_document").tokens(0)[-1] == 0

    write_jsonl(path, sentences(21))
    assert "was made of other inputs" in run(*usual, "--append-eod").stderr
    assert run(*usual, "--append-eod", "--shards", "2", "--overwrite").returncode == 0
    assert IndexedTokens(tmp_path / "out_text_document").num_documents == 21
    assert "already complete" in run(*usual, "--append-eod").stdout


def test_files_of_another_origin_are_not_replaced(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(20))
    usual = (path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "1")
    (tmp_path / "out_text_document.bin").write_bytes(b"of Megatron")
    refused = run(*usual)
    assert "out_text_document.bin: it exists, and no report says of what it was made" in refused.stderr
    assert (tmp_path / "out_text_document.bin").read_bytes() == b"of Megatron"
    assert run(*usual, "--overwrite").returncode == 0
    (tmp_path / "out_text_document.bin").write_bytes(b"cut")
    assert "not all files have the sizes that the report says" in run(*usual).stderr
    assert run(*usual, "--overwrite").returncode == 0
    (tmp_path / ".out.preprocess").mkdir()  # of a run that was killed while it published
    assert "an unfinished run was to replace it" in run(*usual).stderr
    assert run(*usual, "--resume").returncode == 0
    text = path.read_text()
    arguments = command("-", "--format", "jsonl", *usual[1:])
    piped = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60)
    assert "standard input may be another text" in piped.stderr


def test_a_finished_run_with_another_treatment_of_its_bad_records_is_not_the_same(tmp_path, tokenizer):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n{"body": "bad"}\n')
    usual = (path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", "1", "--on-bad-record")
    assert run(*usual, "skip").returncode == 0
    assert "already complete" in run(*usual, "skip").stdout
    assert "was made with --on-bad-record skip" in run(*usual, "quarantine").stderr


@pytest.mark.parametrize(
    ("workers", "open_files", "cause"),
    [
        (10**8, None, "Cannot allocate memory"),  # the shared buffers exceed the address space
        (10**14, None, "too many"),
        (60, 40, "Too many open files"),  # some have been started by then
    ],
)
def test_more_workers_than_can_be_started(tmp_path, tokenizer, workers, open_files, cause):
    """The option is named, and nothing is left: no process and no file."""
    write_jsonl(tmp_path / "in.jsonl", sentences(3))
    before = sorted(tmp_path.rglob("*"))
    limit = f"ulimit -n {open_files} && " if open_files else ""
    given = command("in.jsonl", "--tokenizer", tokenizer, "--output-prefix", "out", "--workers", str(workers))
    done = subprocess.run(
        ["bash", "-c", f'{limit}exec "$@"', "bash", *map(str, given)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = f"cannot start {workers:,} worker processes: {cause}. Give fewer --workers; the default is one per core.\n"
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith(said), done.stderr
    assert sorted(tmp_path.rglob("*")) == before
