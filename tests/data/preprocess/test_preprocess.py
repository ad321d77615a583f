"""Preprocessing: Megatron's documents, the same bytes by any number of workers, bad records named and counted."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.preprocess import preprocess as module
from megalaunch.data.preprocess import state
from megalaunch.data.preprocess.preprocess import Result, preprocess
from megalaunch.data.preprocess.settings import Format, OnBadRecord, Settings
from megalaunch.data.preprocess.state import Progress
from megalaunch.data.tokenizer.tokenizer import Tokenizer, load_tokenizer

BAD = ["{nonsense", "", '{"other": "x"}', '{"text": 7}', '["x"]']


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path) -> Tokenizer:
    return load_tokenizer(tokenizer_path)


def run(inputs: list[Path], prefix: Path, settings: Settings) -> Result:
    return preprocess([str(path) for path in inputs], prefix, settings, lambda progress: None)


def written(result: Result) -> tuple[bytes, bytes]:
    prefix = result.prefixes[0]
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def lines_with_bad(path: Path, good: int) -> Path:
    """`good` records with every kind of bad line strewn among them."""
    lines = [json.dumps({"text": text}) for text in sentences(good)]
    for number, bad in enumerate(BAD):
        lines.insert(3 * number + 1, bad)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_megatrons(tmp_path, tokenizer_path, tokenizer, append_eod):
    path = tmp_path / "in.jsonl"
    records = ["a ship", "", ["one", "", "two"], [], ["", ""], "the sea"]
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in records))
    result = run([path], tmp_path / "out", Settings(tokenizer_path, append_eod=append_eod))
    assert result.prefixes[0] == tmp_path / "out_text_document"
    read = IndexedTokens(result.prefixes[0])
    end = [0] if append_eod else []
    encode = tokenizer.encode
    expected = [encode("a ship") + end, encode("one"), encode("two") + end, encode("the sea") + end]
    assert [read.tokens(number).tolist() for number in range(read.num_sequences)] == expected
    # Empty documents have no sequence and no end token, but count as documents.
    assert read.documents.tolist() == [0, 1, 1, 3, 3, 3, 4]
    assert (result.counts.documents, result.counts.written, result.counts.skipped) == (6, 6, 0)
    assert result.counts.tokens == sum(map(len, expected))


def test_one_and_several_workers_write_the_same_bytes(tmp_path, tokenizer_path):
    path = lines_with_bad(tmp_path / "in.jsonl", 2000)
    settings = Settings(tokenizer_path, on_bad_record=OnBadRecord.SKIP, chunk_bytes=3000)
    results = [run([path], tmp_path / f"out{n}", replace(settings, workers=n)) for n in (1, 2, 3)]
    assert written(results[0]) == written(results[1]) == written(results[2])
    assert results[0].bad_records == results[1].bad_records == results[2].bad_records
    assert results[0].counts.skipped == len(BAD)


def test_only_a_few_chunks_are_in_memory(tmp_path, tokenizer_path, monkeypatch):
    real, drawn, most = module.chunks, 0, 0

    def counted(*arguments):
        nonlocal drawn
        for chunk in real(*arguments):
            drawn += 1
            yield chunk

    def show(progress: Progress) -> None:
        nonlocal shown, most
        shown += 1
        most = max(most, drawn - shown)

    shown = 0
    monkeypatch.setattr(module, "chunks", counted)
    path = write_jsonl(tmp_path / "in.jsonl", sentences(200))
    preprocess([str(path)], tmp_path / "out", Settings(tokenizer_path, workers=2, chunk_bytes=100), show)
    assert shown == drawn > 50
    assert most <= 8


@given(st.lists(st.lists(st.text(max_size=8), max_size=3), min_size=1, max_size=12), st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_chunks_do_not_show(tmp_path_factory, tokenizer_path, documents, chunk):
    folder = tmp_path_factory.mktemp("chunks")
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    whole = run([path], folder / "whole", Settings(tokenizer_path, append_eod=True))
    cut = run([path], folder / "cut", Settings(tokenizer_path, append_eod=True, chunk_bytes=chunk))
    assert written(whole) == written(cut)
    assert IndexedTokens(whole.prefixes[0]).num_documents == len(documents)


def test_inputs_keep_their_order(tmp_path, tokenizer_path, tokenizer):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"file {name}"])
    (tmp_path / "c.txt").write_text("plain\n\ntext\n")
    inputs = [tmp_path / "c.txt", tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    read = IndexedTokens(run(inputs, tmp_path / "out", Settings(tokenizer_path)).prefixes[0])
    texts = [tokenizer.decode(read.tokens(number).tolist()) for number in range(3)]
    assert texts == ["plain\n\ntext\n", "file b", "file a"]


@pytest.mark.parametrize(
    ("kind", "name", "count"),
    [(Format.AUTO, "x.jsonl", 2), (Format.AUTO, "x.txt", 1), (Format.JSONL, "x.txt", 2), (Format.TEXT, "x.jsonl", 1)],
)
def test_the_format_can_be_forced(tmp_path, tokenizer_path, kind, name, count):
    path = write_jsonl(tmp_path / name, ["one", "two"])
    assert run([path], tmp_path / "out", Settings(tokenizer_path, format=kind)).counts.written == count


def test_another_key_names_the_files(tmp_path, tokenizer_path):
    path = write_jsonl(tmp_path / "in.jsonl", ["one"], key="body")
    result = run([path], tmp_path / "deep" / "out.v1", Settings(tokenizer_path, json_keys=("body",)))
    assert result.prefixes[0] == tmp_path / "deep" / "out.v1_body_document"
    assert IndexedTokens(result.prefixes[0]).num_documents == 1


@pytest.mark.parametrize(("bad", "workers"), [*((bad, 1) for bad in BAD), ('{"text": "a\\ud800"}', 1), (BAD[0], 2)])
def test_a_bad_record_stops_by_name_and_leaves_nothing(tmp_path, tokenizer_path, workers, bad):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good"}\n' * 3 + bad + "\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 4: .*--on-bad-record skip\.$"):
        run([path], tmp_path / "out", Settings(tokenizer_path, workers))
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_bad_records_are_left_out_and_counted(tmp_path, tokenizer_path):
    path = lines_with_bad(tmp_path / "in.jsonl", 50)
    text = tmp_path / "latin.txt"
    text.write_bytes(b"fine\ncaf\xe9\n")
    result = run([path, text], tmp_path / "out", Settings(tokenizer_path, on_bad_record=OnBadRecord.SKIP))
    counts = result.counts
    assert (counts.documents, counts.written, counts.skipped) == (56, 50, 6)
    assert [record["line"] for record in result.bad_records] == [2, 5, 8, 11, 14, 2]
    assert result.bad_records[0]["file"] == str(path)
    assert result.bad_records[2]["cause"] == 'the record has no key "text"'
    good = write_jsonl(tmp_path / "good.jsonl", sentences(50))
    assert written(run([good], tmp_path / "good", Settings(tokenizer_path))) == written(result)


def test_the_report_tells_all(tmp_path, tokenizer_path, monkeypatch):
    monkeypatch.setattr(state, "BAD_RECORDS_LISTED", 3)
    path = lines_with_bad(tmp_path / "in.jsonl", 50)
    result = run([path], tmp_path / "out", Settings(tokenizer_path, append_eod=True, on_bad_record=OnBadRecord.SKIP))
    assert result.report == tmp_path / "out_text_document.json"
    report = json.loads(result.report.read_text())
    counts = report["counts"]
    assert counts["documents"] == 55 == counts["written"] + counts["skipped"]
    assert counts["tokens"] == IndexedTokens(result.prefixes[0]).num_tokens
    assert counts["bytes_read"] == counts["bytes_total"] == path.stat().st_size
    assert report["settings"] == {
        "tokenizer": str(tokenizer_path),
        "merges": None,
        "tiktoken": {"pattern": "v2", "vocab_size": 131072, "special_tokens": 1000},
        "workers": 1,
        "append_eod": True,
        "add_special_tokens": True,
        "json_keys": ["text"],
        "format": "auto",
        "on_bad_record": "skip",
        "language": None,
        "record_bytes": 64 << 20,
    }
    assert report["tokenizer"]["vocab_size"] == 300
    assert len(report["tokenizer"]["sha256"]) == 64
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert report["inputs"] == [{"file": str(path), "bytes": path.stat().st_size, "sha256": digest}]
    assert report["engine"]["name"] in ("gigatoken", "tokenizers")
    assert len(report["bad_records"]) == 3


def test_progress_grows_to_the_whole(tmp_path, tokenizer_path):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(100))
    seen: list[tuple[int, int]] = []

    def show(progress: Progress) -> None:
        seen.append((progress.bytes_read, progress.documents))

    preprocess([str(path)], tmp_path / "out", Settings(tokenizer_path, chunk_bytes=500), show)
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert seen[-1] == (path.stat().st_size, 100)


def test_errors_before_the_first_record(tmp_path, tokenizer_path):
    path = write_jsonl(tmp_path / "in.jsonl", ["x"])
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError, match=r"empty\.jsonl: the inputs hold no documents"):
        run([empty], tmp_path / "out", Settings(tokenizer_path))
    with pytest.raises(DataError, match="no such input"):
        run([tmp_path / "nowhere"], tmp_path / "out", Settings(tokenizer_path))
    with pytest.raises(DataError, match=r"none\.json: no such file"):
        run([path], tmp_path / "out", Settings(tmp_path / "none.json"))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty.jsonl", "in.jsonl"]


def test_end_tokens_need_one_in_the_vocabulary(tmp_path, tokenizer_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_path.read_text(encoding="utf-8").replace("<|endoftext|>", "<|x|>"), encoding="utf-8")
    corpus = write_jsonl(tmp_path / "in.jsonl", ["x"])
    with pytest.raises(DataError, match=r"no end-of-document token .* Leave out --append-eod\."):
        run([corpus], tmp_path / "out", Settings(path, append_eod=True))
    assert run([corpus], tmp_path / "out", Settings(path)).counts.written == 1


MANY = """
import sys
import threading
from pathlib import Path
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import Settings
if __name__ == "__main__":
    if sys.argv[4] == "spawned":
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # who is not alone does not fork
    settings = Settings(Path(sys.argv[2]), workers=2, chunk_bytes=50_000)
    preprocess([sys.argv[1]], Path(sys.argv[3]), settings, lambda progress: print(progress.documents, flush=True))
"""


def children_of(pid: int) -> list[int]:
    children = []
    for task in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = task.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            children.append(int(task.parent.name))
    return children


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(params=slow_but(["forked", "spawned"], "forked"))
def running(request, tmp_path, tokenizer_path):
    """A preprocessing of a minute or so by two workers, under way; its output prefix is `out`."""
    path = write_jsonl(tmp_path / "in.jsonl", [" ".join(sentences(100))] * 60_000)
    (tmp_path / "many.py").write_text(MANY)
    command = [sys.executable, tmp_path / "many.py", path, tokenizer_path, tmp_path / "out", request.param]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # numpy's own threads would forbid a fork
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline().strip().isdigit()
    started = children_of(process.pid)
    yield process
    for pid in started:  # what a test proves dead must not outlive a failure of it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def test_workers_die_with_their_parent(running, tmp_path):
    workers = children_of(running.pid)
    assert len(workers) >= 2
    running.send_signal(signal.SIGKILL)
    running.wait()
    deadline = time.monotonic() + 5
    while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(worker) for worker in workers)
    assert not list(tmp_path.glob("out*"))


def test_a_killed_worker_is_an_error_not_a_hang(running, tmp_path):
    workers = [
        pid for pid in children_of(running.pid) if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()
    ]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 1
    assert "a worker process died, perhaps for lack of memory. Give fewer --workers" in errors
    assert not list(tmp_path.glob("out*"))


def test_a_post_processor_that_cannot_be_kept_is_refused_by_name(tmp_path, tokenizer_path):
    """One that puts a token between two copies of the text; without its tokens the file is as good as any."""
    import tokenizers

    path = small_tokenizer(tmp_path / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="X $A X $A", special_tokens=[("X", 0)])
    inner.save(str(path))
    source = write_jsonl(tmp_path / "in.jsonl", ["a ship"])
    with pytest.raises(DataError, match="does more than add tokens before and after a text") as raised:
        run([source], tmp_path / "out", Settings(path))
    assert "--no-bos" in str(raised.value)
    result = run([source], tmp_path / "out", Settings(path, add_special_tokens=False))
    assert IndexedTokens(result.prefixes[0]).tokens(0).tolist() == 2 * load_tokenizer(tokenizer_path).encode("a ship")
