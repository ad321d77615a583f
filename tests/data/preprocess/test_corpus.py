"""Which documents a corpus has, under which names, and every way in which it can be wrong."""

import bz2
import gzip
import lzma
import os
import sysconfig
from pathlib import Path

import pytest
from token_files import write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.corpus.documents import find_corpus
from megalaunch.data.preprocess.records import record_sentences


def tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}", encoding="utf-8")


def names_of(source: object) -> list[str]:
    return [file.name for file in find_corpus(str(source), "text").files]


def documents_of(source: object, key: str = "text") -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in find_corpus(str(source), key).documents()]


def test_the_standard_library_is_all_readable_code():
    corpus = find_corpus("python-stdlib", "text")
    names = [file.name for file in corpus.files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py", "collections/__init__.py"} <= set(names)
    assert len(names) > 400
    assert 5e6 < corpus.size() < 30e6
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
    documents = list(corpus.documents())
    assert [document.name for document in documents] == names
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen = next(document for document in documents if document.name == "json/decoder.py")
    assert chosen.text.encode() == (root / chosen.name).read_bytes()


def test_a_standard_library_elsewhere(tmp_path, monkeypatch):
    tree(
        tmp_path, "b.py", "a/c.py", "a/test/x.py", "a.py", "notes.txt", "site-packages/p/q.py", "tests/y.py", "test.py"
    )
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert names_of("python-stdlib") == ["a.py", "a/c.py", "b.py", "test.py"]


def test_no_sources_of_the_standard_library(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match=r"the folder holds no \.py files"):
        find_corpus("python-stdlib", "text")


def test_a_folder_in_stable_order_without_hidden_files(tmp_path):
    tree(tmp_path, "b.txt", "a/z.md", "a.txt", ".git/config", ".hidden", "a/.x")
    assert names_of(tmp_path) == ["a.txt", "a/z.md", "b.txt"]
    assert documents_of(tmp_path)[1] == ("a/z.md", "text of a/z.md")


def test_names_do_not_depend_on_the_place(tmp_path, monkeypatch):
    tree(tmp_path / "one/c", "x.txt", "d/y.txt")
    tree(tmp_path / "two/c", "x.txt", "d/y.txt")
    first = documents_of(tmp_path / "one/c")
    assert first == documents_of(tmp_path / "two/c") == documents_of(tmp_path / "one/c/**/*.txt")[::1]
    monkeypatch.chdir(tmp_path / "one/c")
    assert documents_of("**/*.txt") == first
    monkeypatch.setenv("HOME", str(tmp_path))
    assert documents_of("~/one/c") == first


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "d/c.txt"]),
        ("d/*", ["c.txt", "e.md"]),
        ("[a]*.txt", ["a.txt"]),
        ("**", ["a.txt", "b.txt", "d/c.txt", "d/e.md"]),
    ],
)
def test_globs(tmp_path, pattern, names):
    tree(tmp_path, "b.txt", "a.txt", "d/c.txt", "d/e.md", ".h/c.txt")
    assert names_of(f"{tmp_path}/{pattern}") == names


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    tree(tmp_path, "a[1].txt", "a1.txt")
    assert names_of(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_jsonl_documents_are_lines(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", ["one", "", "drei \u00fc"])
    assert documents_of(tmp_path / "x.jsonl") == [("x.jsonl:1", "one"), ("x.jsonl:2", ""), ("x.jsonl:3", "drei \u00fc")]
    tree(tmp_path, "y.txt")
    assert [name for name, _ in documents_of(tmp_path)] == ["x.jsonl:1", "x.jsonl:2", "x.jsonl:3", "y.txt"]
    write_jsonl(tmp_path / "k.ndjson", ["other"], key="body")
    assert documents_of(tmp_path / "k.ndjson", "body") == [("k.ndjson:1", "other")]


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_hold_the_documents_of_plain_ones(tmp_path, suffix):
    for name in ("x.jsonl", "book.txt"):
        texts = [f"text {number} " * 40 for number in range(900)]
        write_jsonl(tmp_path / name, texts)
        packed = tmp_path / f"{name}{suffix}"
        packed.write_bytes(PACKERS[suffix]((tmp_path / name).read_bytes()))
        plain = documents_of(tmp_path / name)
        assert [text for _, text in documents_of(packed)] == [text for _, text in plain]
        assert documents_of(packed)[0][0] == f"{name}{suffix}:1"
        packed.write_bytes(packed.read_bytes()[:-20])
        with pytest.raises(DataError, match=rf"{name}{suffix}: the {suffix} stream is truncated or corrupt"):
            documents_of(packed)


def test_rows_of_a_table_are_documents(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (the extra `data`) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"text": ["one", "", "drei \u00fc"], "id": [1, 2, 3]}), path)
    assert documents_of(path) == [("x.parquet:1", "one"), ("x.parquet:2", ""), ("x.parquet:3", "drei \u00fc")]
    with pytest.raises(DataError, match=r'x\.parquet, line 1: "id" holds a number, not text'):
        documents_of(path, "id")
    with pytest.raises(DataError, match=r'x\.parquet: the table has no column "body"\. Its columns are text, id'):
        documents_of(path, "body")


def test_json_is_records_as_in_preprocess(tmp_path):
    write_jsonl(tmp_path / "x.json", ["one", "two"])
    assert documents_of(tmp_path / "x.json") == [("x.json:1", "one"), ("x.json:2", "two")]


def test_a_byte_order_mark_before_jsonl(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    assert [text for _, text in documents_of(tmp_path / "x.jsonl")] == ["a", "b"]


def test_a_lone_text_file_is_cut_into_sections(tmp_path):
    paragraph = "".join(f"line {number} of a paragraph\n" for number in range(40)) + "\n"
    book = tmp_path / "book.txt"
    book.write_text(paragraph * 30, encoding="utf-8")
    documents = documents_of(book)
    assert "".join(text for _, text in documents) == paragraph * 30
    assert len(documents) == 6  # of 966 bytes each five paragraphs pass 4,096
    assert [name for name, _ in documents[:2]] == ["book.txt:1", "book.txt:206"]
    assert all(text.endswith("\n\n") for _, text in documents)
    assert documents_of(tmp_path) == documents_of(f"{tmp_path}/*.txt") == documents


def test_a_lone_text_file_without_blank_lines(tmp_path):
    book = tmp_path / "log.txt"
    book.write_bytes(("z\u00e4hler 12345\r\n" * 10_000).encode())
    documents = documents_of(book)
    assert "".join(text for _, text in documents).encode() == book.read_bytes()
    assert {len(text.encode()) for _, text in documents[:-1]} == {16_395}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"{nonsense\n", "no JSON (Expecting property name"),
        (b'{"text": "cut', "no JSON (Unterminated string"),
        (b"\n", "the line is empty. A jsonl file holds one JSON object a line"),
        (b"  \r\n", "the line is empty"),
        (b"[1, 2]\n", "a record is a JSON object, this is a list"),
        (b'"text"\n', "a record is a JSON object, this is a string"),
        (b"null\n", "a record is a JSON object, this is null"),
        (b'{"body": "x", "id": 3}\n', 'the record has no key "text". Its keys are body, id: name the one'),
        (b"{}\n", 'the record has no key "text". Its keys are none'),
        (b'{"text": 3}\n', '"text" holds a number, not text'),
        (b'{"text": null}\n', '"text" holds null, not text'),
        (b'{"text": true}\n', '"text" holds a truth value, not text'),
        (b'{"text": {"a": 1}}\n', '"text" holds an object, not text'),
        (b'{"text": ["a"]}\n', '"text" holds a list, not text'),
        (b'{"text": "a\\ud800"}\n', '"text" holds half a character (\\ud800)'),
        (b'{"text": "caf\xe9"}\n', "no UTF-8 text (byte 0xe9 in column 14). Convert it to UTF-8"),
        (b'{"text": ' + b"[" * 100_000 + b"\n", "JSON nested too deeply"),
        (b'{"text": ' + b"9" * 10_000 + b"}\n", "no JSON (Exceeds the limit"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path, line, cause):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line)
    with pytest.raises(DataError) as caught:
        documents_of(path)
    assert str(caught.value).startswith(f"{path}, line 2: {cause}")
    assert (caught.value.file, caught.value.record) == (path, 2)


@pytest.mark.parametrize(
    ("value", "result"), [(b'"a b"', ["a b"]), (b'["a", "", "b"]', ["a", "", "b"]), (b"[]", []), (b'""', [""])]
)
def test_sentences_of_a_record(value, result):
    assert record_sentences(b'{"text": ' + value + b"}", "text", Path("x"), 1) == result


@pytest.mark.parametrize(("value", "kind"), [(b"7", "a number"), (b'["a", 7]', "a number"), (b'[["a"]]', "a list")])
def test_sentences_that_are_no_text(value, kind):
    with pytest.raises(DataError, match=f'x, line 5: "text" holds {kind}, not text'):
        record_sentences(b'{"text": ' + value + b"}", "text", Path("x"), 5)


@pytest.mark.parametrize("several", [False, True])
def test_text_that_is_no_utf8_is_named_by_line(tmp_path, several):
    (tmp_path / "a.txt").write_bytes(b"first\nsecond\nca\xe9\n")
    if several:
        tree(tmp_path, "b.txt")
    with pytest.raises(DataError, match=r"a\.txt, line 3: no UTF-8 text \(byte 0xe9 in column 3\)"):
        documents_of(tmp_path)


def test_a_later_section_that_is_no_utf8_is_named_by_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"words\n" * 5000 + b"\xff\n")
    with pytest.raises(DataError, match=r"a\.txt, line 5001: no UTF-8 text \(byte 0xff in column 1\)"):
        documents_of(tmp_path)


def test_text_with_nul_bytes_is_refused_as_in_preprocess(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"words\n" * 5000 + b"a\0b\n")
    with pytest.raises(DataError, match=r"a\.txt, line 5001: it holds NUL bytes: .*\. Leave it out"):
        documents_of(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("nowhere", "no such corpus. A corpus is a file, a folder, a glob or python-stdlib"),
        ("nowhere/*.txt", "no file matches this corpus"),
        ("empty", "the folder holds no readable files"),
        ("pipe", "it is neither a regular file nor a directory"),
    ],
)
def test_a_corpus_that_is_not_there(tmp_path, monkeypatch, source, cause):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError) as caught:
        find_corpus(source, "text")
    assert str(caught.value).startswith(f"{source}: {cause}")


def test_a_file_that_cannot_be_read(tmp_path):
    tree(tmp_path, "a.txt")
    corpus = find_corpus(str(tmp_path), "text")
    (tmp_path / "a.txt").unlink()
    for read in (corpus.size, corpus.files[0].sha256, lambda: list(corpus.documents())):
        with pytest.raises(DataError, match=r"a\.txt: cannot read it: No such file or directory\. Correct the path"):
            read()


def test_a_folder_that_cannot_be_listed(tmp_path, monkeypatch):
    tree(tmp_path, "a.txt", "b/c.txt")
    real = os.scandir

    def refuse(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"b: cannot read it: Permission denied"):
        find_corpus(str(tmp_path), "text")
