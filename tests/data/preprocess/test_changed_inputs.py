"""An input that something writes to while it is read is refused, and so is one whose records are bad past a limit."""

import gzip
import json
import os
from pathlib import Path

import pytest
from slow_cases import slow_but
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data import train_tokenizer
from megalaunch.data.errors import DataError
from megalaunch.data.prepare import prepare
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import MaxBad, OnBadRecord, Settings
from megalaunch.data.train_tokenizer import train_tokenizer_on
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def once(change, after=0):
    """A callback that calls `change` once, the first time or so many times later."""
    changes = [change, *[lambda: None] * after]
    return lambda *_: changes.pop()() if changes else None


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"text": "late"}\n')


def overwrite(path: Path) -> None:
    """As many bytes as before, with other text in them."""
    path.write_bytes(path.read_bytes().replace(b"sea", b"see"))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CHANGES = [
    (append, r"it changed while it was read: 4,\d+ bytes at the start, 4,\d+ now"),
    (overwrite, r"it changed while it was read \(its modification time differs"),
    (cut, "it changed while it was read"),
    (Path.unlink, "cannot find it again after it was read"),
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("change", "said"),
    slow_but(CHANGES, *CHANGES[:2]),
)
def test_a_file_that_changes_while_it_is_read(tmp_path, tokenizer, change, said, workers):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(80))
    with pytest.raises(DataError, match=rf"in\.jsonl: {said}.*read a copy\.$"):
        preprocess(
            [str(path)],
            tmp_path / "out",
            Settings(tokenizer, workers=workers, chunk_bytes=500, checkpoint_seconds=1000),
            once(lambda: change(path)),
        )
    assert not list(tmp_path.glob("*out*"))


def test_a_packed_file_that_changes(tmp_path, tokenizer):
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in sentences(80)).encode()))
    with pytest.raises(DataError, match="it changed while it was read"):
        preprocess([str(path)], tmp_path / "out", Settings(tokenizer, chunk_bytes=500), once(lambda: append(path)))


def test_what_was_made_of_a_changed_file_is_not_resumed(tmp_path, tokenizer):
    """Even where the file is put back as it was, with its times: the tokens may be of what it held between."""
    path = write_jsonl(tmp_path / "in.jsonl", sentences(80))
    first, before = path.read_bytes(), path.stat()
    settings = Settings(tokenizer, chunk_bytes=500, checkpoint_seconds=0)
    with pytest.raises(DataError, match="it changed while it was read"):
        preprocess([str(path)], tmp_path / "out", settings, once(lambda: overwrite(path), after=2))
    path.write_bytes(first)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    said: list[str] = []
    resumed = Settings(tokenizer, resume=True)
    preprocess([str(path)], tmp_path / "out", resumed, lambda progress: None, said.append)
    assert any(text.startswith("there is nothing to resume") for text in said)


def test_a_change_is_found_at_a_checkpoint(tmp_path, tokenizer):
    """Not only at the end of the inputs, which may be days away."""
    path = write_jsonl(tmp_path / "in.jsonl", sentences(80))
    shown: list[object] = []
    with pytest.raises(DataError, match="it changed while it was read"):
        preprocess(
            [str(path)],
            tmp_path / "out",
            Settings(tokenizer, chunk_bytes=500, checkpoint_seconds=0),
            lambda progress: (shown.append(progress), append(path)),
        )
    assert len(shown) == 1


@pytest.mark.parametrize("change", [append, overwrite])
def test_a_corpus_that_changes_while_it_is_prepared(tmp_path, tokenizer, change):
    """What is cached under the hash of the corpus is never that of another."""
    path = write_jsonl(tmp_path / "in.jsonl", sentences(80))

    def report(line: str) -> None:
        if line.startswith("encoding"):
            change(path)

    data = DataSpec(corpus=str(path), cache_directory=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"in\.jsonl: it changed while it was read"):
        prepare(data, TokenizerSpec(path=str(tokenizer)), report)
    assert [folder.name[-5:] for folder in (tmp_path / "cache" / "corpora").iterdir()] == [".lock"]


def test_a_text_that_changes_while_a_tokenizer_learns_from_it(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(80))
    real = train_tokenizer.train_tokenizer
    monkeypatch.setattr(train_tokenizer, "train_tokenizer", lambda *arguments: (real(*arguments), append(path))[0])
    with pytest.raises(DataError, match="it changed while it was read"):
        train_tokenizer_on([str(path)], ("text",), 300, tmp_path / "tokenizer.json", 1.0)
    assert not (tmp_path / "tokenizer.json").exists()


def bad_lines(path: Path, bad: int, good: int) -> Path:
    path.write_text('{"txet": "x"}\n' * bad + '{"text": "the sea"}\n' * good)
    return path


@pytest.mark.parametrize("on_bad_record", [OnBadRecord.SKIP, OnBadRecord.QUARANTINE])
def test_all_records_bad_is_a_failure(tmp_path, tokenizer, on_bad_record):
    path = bad_lines(tmp_path / "in.jsonl", 5, 0)
    said = rf"none of the 5 records can be used, the first: {path}, line 1: the record has no key \"text\""
    with pytest.raises(DataError, match=said):
        preprocess([str(path)], tmp_path / "out", Settings(tokenizer, on_bad_record=on_bad_record), lambda _: None)
    assert not list(tmp_path.glob("out*"))


def test_records_without_text_are_noted(tmp_path, tokenizer):
    """A shard of a larger corpus may hold nothing else."""
    path, notes = write_jsonl(tmp_path / "in.jsonl", ["", ""]), []
    preprocess([str(path)], tmp_path / "out", Settings(tokenizer), lambda _: None, notes.append)
    assert "the files hold no tokens: the text of all 2 documents is empty" in notes


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("2", "3 records are bad, --max-bad allows 2, the first: .*line 1: the record has no key"),
        ("29%", "3 of 10 records are bad, 30.00%; --max-bad allows 29%, the first: .*line 1: the record has no key"),
        ("0", "1 records are bad, --max-bad allows 0"),
        ("3", None),
        ("30%", None),
    ],
)
def test_max_bad(tmp_path, tokenizer, limit, said):
    path = bad_lines(tmp_path / "in.jsonl", 3, 7)
    chosen = Settings(
        tokenizer, on_bad_record=OnBadRecord.SKIP, max_bad=MaxBad.parse(limit), chunk_bytes=1, checkpoint_seconds=0
    )
    if said is None:
        assert preprocess([str(path)], tmp_path / "out", chosen, lambda _: None).counts.skipped == 3
        return
    with pytest.raises(DataError, match=said):
        preprocess([str(path)], tmp_path / "out", chosen, lambda _: None)
    # With a higher limit it continues, and lists each bad record once.
    chosen = Settings(tokenizer, on_bad_record=OnBadRecord.SKIP, chunk_bytes=1, resume=True)
    done = preprocess([str(path)], tmp_path / "out", chosen, lambda _: None)
    assert [bad["line"] for bad in done.bad_records] == [1, 2, 3]


@pytest.mark.parametrize("text", ["-1", "x", "101%", "-1%", "nan%", "1.5", ""])
def test_what_is_no_limit(text):
    with pytest.raises(ValueError, match=r".*"):
        MaxBad.parse(text)
