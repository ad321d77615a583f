"""Every kind of input gives the same documents, and every bad one is named: file, line, cause."""

import bz2
import errno
import gzip
import io
import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.preprocess import readers
from megalaunch.data.preprocess.chunking import Position, chunks
from megalaunch.data.preprocess.inputs import find_inputs
from megalaunch.data.preprocess.preprocess import Result, preprocess
from megalaunch.data.preprocess.settings import Format, OnBadRecord, Settings

TEXTS = sentences(300)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def run(source: object, prefix: Path, settings: Settings) -> Result:
    return preprocess([str(source)], prefix, settings, lambda progress: None)


def written(result: Result) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for prefix in result.prefixes for end in (".bin", ".idx")]


def zst(content: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the extra `data` is not installed")
    half = len(content) // 2  # two frames, as zstd -T or cat makes them
    return zstandard.compress(content[:half]) + zstandard.compress(content[half:])


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("chunk", [300, 1 << 20])
def test_compressed_files_give_the_bytes_of_plain_ones(tmp_path, tokenizer, suffix, chunk):
    settings = Settings(tokenizer, chunk_bytes=chunk)
    plain = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    packed = tmp_path / f"in.jsonl{suffix}"
    packed.write_bytes(PACKERS[suffix](plain.read_bytes()))
    result = run(packed, tmp_path / "packed", settings)
    assert written(result) == written(run(plain, tmp_path / "plain", settings))
    assert result.counts.bytes_read == packed.stat().st_size


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_file_is_read_from_every_position(tmp_path, monkeypatch, suffix):
    """A resumed run starts within a decompressed block: no line before the position is read again."""
    monkeypatch.setattr(readers, "_BLOCK", 1000)
    content = write_jsonl(tmp_path / "in.jsonl", TEXTS).read_bytes()
    packed = tmp_path / f"in.jsonl{suffix}"
    packed.write_bytes(PACKERS[suffix](content))
    inputs, settings = find_inputs([str(packed)], Format.AUTO), Settings(tmp_path, chunk_bytes=300)
    whole = list(chunks(inputs, settings, Position(0, 0)))
    assert any(chunk.end.offset % 1000 for chunk in whole)
    for number, before in enumerate(whole[:-1], 1):
        rest = list(chunks(inputs, settings, before.end))
        assert b"".join(chunk.body.content for chunk in rest) == content[before.end.offset :]
        assert sum(chunk.stored for chunk in whole[:number] + rest) == packed.stat().st_size


@pytest.mark.parametrize("name", ["in.JSONL", "in.jsonl.GZ", "in.Jsonl.gz"])
def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path, tokenizer, name):
    """Otherwise all lines of the file would be one document, without a word."""
    content = write_jsonl(tmp_path / "in.jsonl", TEXTS[:9]).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith("gz") else content)
    assert run(tmp_path / name, tmp_path / "out", Settings(tokenizer)).counts.documents == 9


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_failing_disk_is_no_corrupt_stream(tmp_path, tokenizer, monkeypatch, suffix):
    """Skipping bad records must not skip the rest of a file that could not be read."""
    packed = tmp_path / f"in.jsonl{suffix}"
    packed.write_bytes(PACKERS[suffix](write_jsonl(tmp_path / "in.jsonl", TEXTS).read_bytes()))

    class Failing(io.BytesIO):
        def read(self, size=-1):
            raise OSError(errno.EIO, "Input/output error")

        readinto = readinto1 = read1 = read

    monkeypatch.setattr(readers, "open_source", lambda path: Failing())
    with pytest.raises(DataError, match=rf"in\.jsonl{suffix}: cannot read it: Input/output error"):
        run(packed, tmp_path / "out", Settings(tokenizer, on_bad_record=OnBadRecord.SKIP))


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_cut_stream_is_one_bad_record(tmp_path, tokenizer, suffix):
    texts = [*TEXTS, " " * (2 << 20)]  # the last is unpacked after the others, so that only it is lost
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    packed = tmp_path / f"in.jsonl{suffix}"
    packed.write_bytes(PACKERS[suffix](content)[:-9])
    with pytest.raises(DataError, match=rf"in\.jsonl{suffix}.*the {suffix} stream is truncated or corrupt"):
        run(packed, tmp_path / "out", Settings(tokenizer))
    counts = run(packed, tmp_path / "out", Settings(tokenizer, on_bad_record=OnBadRecord.SKIP)).counts
    assert (counts.skipped, counts.written) == (1, len(TEXTS))


def test_a_compressed_text_file_is_one_document(tmp_path, tokenizer):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"the old\n\nsea\n"))
    (tmp_path / "b.txt").write_bytes(b"the old\n\nsea\n")
    first, second = (run(tmp_path / name, tmp_path / name[0], Settings(tokenizer)) for name in ("a.txt.gz", "b.txt"))
    assert written(first) == written(second)


@pytest.mark.parametrize("binary", [False, True])
def test_parquet(tmp_path, tokenizer, binary):
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    values = [text.encode() for text in TEXTS] if binary else TEXTS
    parquet.write_table(
        arrow.table({"id": list(range(300)), "text": values}), tmp_path / "in.parquet", row_group_size=70
    )
    settings = Settings(tokenizer, chunk_bytes=500)
    result = run(tmp_path / "in.parquet", tmp_path / "table", settings)
    assert written(result) == written(run(plain, tmp_path / "plain", settings))
    with pytest.raises(DataError, match=r'the table has no column "body"\. Its columns are id, text: name'):
        run(tmp_path / "in.parquet", tmp_path / "x", Settings(tokenizer, json_keys=("body",)))


def test_bad_rows_of_a_table(tmp_path, tokenizer):
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": [b"good", None, b"caf\xe9", b"good"]}), tmp_path / "in.parquet")
    result = run(tmp_path / "in.parquet", tmp_path / "out", Settings(tokenizer, on_bad_record=OnBadRecord.SKIP))
    assert [record["line"] for record in result.bad_records] == [2, 3]
    assert result.bad_records[0]["cause"] == '"text" holds null, not text'
    assert "no UTF-8 text" in result.bad_records[1]["cause"]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"bad\.parquet: it cannot be read as parquet"):
        run(tmp_path / "bad.parquet", tmp_path / "out", Settings(tokenizer))


def test_a_missing_package_is_named_with_its_extra(tmp_path, tokenizer, monkeypatch):
    for module, name in (("zstandard", "x.jsonl.zst"), ("pyarrow.parquet", "x.parquet")):
        monkeypatch.setitem(sys.modules, module, None)
        (tmp_path / name).write_bytes(b"x")
        message = rf"reading it needs the package {module.partition('.')[0]}\. pip install 'megalaunch\[data\]' brings"
        with pytest.raises(DataError, match=message):
            run(tmp_path / name, tmp_path / "out", Settings(tokenizer))


def test_standard_input(tmp_path, tokenizer, monkeypatch):
    plain = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plain.read_bytes())))
    settings = Settings(tokenizer, chunk_bytes=1000)
    assert written(run("-", tmp_path / "piped", settings)) == written(run(plain, tmp_path / "plain", settings))
    with pytest.raises(DataError, match="standard input cannot be read again"):
        run("-", tmp_path / "piped", replace(settings, resume=True))
    with pytest.raises(DataError, match="standard input is read as jsonl only"):
        run("-", tmp_path / "piped", Settings(tokenizer, format=Format.TEXT))


def test_several_keys_stay_aligned(tmp_path, tokenizer):
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": "one", "b": ["x", "y"]}\n{"a": "two"}\n{"a": "", "b": "z"}\n{"b": "z", "a": "end"}\n')
    settings = Settings(tokenizer, json_keys=("a", "b"), append_eod=True, on_bad_record=OnBadRecord.SKIP)
    result = run(path, tmp_path / "out", settings)
    assert [prefix.name for prefix in result.prefixes] == ["out_a_document", "out_b_document"]
    first, second = map(IndexedTokens, result.prefixes)
    assert first.documents.tolist() == [0, 1, 1, 2]
    assert second.documents.tolist() == [0, 2, 3, 4]
    assert result.counts.tokens == first.num_tokens + second.num_tokens
    assert [record["line"] for record in result.bad_records] == [2]


BAD_LINES = [
    (b'{"text": "a\x00b"}', r"a NUL byte in column 12: the file is damaged"),
    (b"\x00\x00\x00\x00", r"a NUL byte in column 1"),
    (b'{"text": "caf\xe9"}', r"no UTF-8 text \(byte 0xe9 in column 14\)"),
    (b'{"text": ["a", 7]}', r'"text" holds a number, not text'),
    (b'{"text": {"a": 1}}', r'"text" holds an object, not text'),
    (b'{"text": null}', r'"text" holds null, not text'),
    (b'{"text": "cut', r"no JSON \(Unterminated string starting at: column 10\)"),
    (b"[" * 100_000, r"JSON nested too deeply"),
    (b'{"text": "' + b"x" * 5000 + b'"}', r"the record has 0 MB, the limit is 0 MB\. Raise --max-record-mb"),
]


@pytest.mark.parametrize(("bad", "cause"), BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bad_lines(tmp_path, tokenizer, bad, cause, suffix):
    """Named with file and line when they stop the run; else counted, and kept in the quarantine."""
    good = b'{"text": "the sea"}\n'
    path = tmp_path / f"in.jsonl{suffix}"
    content = good * 200 + bad + b"\n" + good * 3
    path.write_bytes(gzip.compress(content) if suffix else content)
    limit = 4000 if len(bad) == 5012 else 1 << 20
    settings = Settings(tokenizer, chunk_bytes=256, record_bytes=limit)
    with pytest.raises(DataError, match=rf"in\.jsonl{suffix}, line 201: {cause}"):
        run(path, tmp_path / "out", settings)
    assert not list(tmp_path.glob("out*"))
    skipped = run(path, tmp_path / "out", replace(settings, on_bad_record=OnBadRecord.SKIP))
    aside = run(path, tmp_path / "aside", replace(settings, on_bad_record=OnBadRecord.QUARANTINE))
    assert written(skipped) == written(aside)
    for result in (skipped, aside):
        counts = result.counts
        assert counts.documents == 204 == counts.written + counts.skipped + counts.quarantined
        assert [record["line"] for record in result.bad_records] == [201]
    assert (skipped.counts.skipped, aside.counts.quarantined) == (1, 1)
    assert skipped.quarantine is None
    kept = json.loads(aside.quarantine.read_text())
    assert (kept["file"], kept["line"]) == (str(path), 201)
    again = run(path, tmp_path / "aside", replace(settings, on_bad_record=OnBadRecord.SKIP))
    assert again.quarantine is None
    assert not aside.quarantine.exists()  # it belonged to the token files that were replaced
    if limit > 4000:
        assert kept["record"].encode()[:5] == bad.decode("utf-8", "backslashreplace").encode()[:5]


def test_a_text_file_with_nul_bytes(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(b"fine\nthen \0 not")
    with pytest.raises(DataError, match=r"a\.txt, line 2: it holds NUL bytes"):
        run(tmp_path / "a.txt", tmp_path / "out", Settings(tokenizer))
    with pytest.raises(DataError, match=r"a\.txt, line 1: the record has 0 MB, the limit is 0 MB"):
        run(tmp_path / "a.txt", tmp_path / "out", Settings(tokenizer, record_bytes=5))


def test_a_line_of_100_mb_takes_no_memory_worth_naming(tmp_path, tokenizer):
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "the sea"}\n{"text": "')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "the sea"}\n')
    settings = Settings(tokenizer)
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: the record has 100 MB, the limit is 67 MB"):
        run(path, tmp_path / "out", settings)
    result = run(path, tmp_path / "out", replace(settings, on_bad_record=OnBadRecord.SKIP))
    assert (result.counts.written, result.counts.skipped) == (2, 1)
    assert result.counts.bytes_read == path.stat().st_size


def test_globs_and_folders_keep_a_stable_order(tmp_path, tokenizer):
    for name in ("c", "a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"file {name}"])
    expected = written(run(tmp_path / "*.jsonl", tmp_path / "out" / "one", Settings(tokenizer)))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b", "c", "a"):
        write_jsonl(folder / f"{name}.jsonl", [f"file {name}"])
    assert written(run(folder, tmp_path / "out" / "two", Settings(tokenizer))) == expected


def test_an_id_beyond_the_vocabulary_is_a_bad_record(tmp_path, tokenizer, monkeypatch):
    from megalaunch.data.preprocess.encoder_pool import EncodeWorker

    real = EncodeWorker._load_encoder
    monkeypatch.setattr(
        EncodeWorker,
        "_load_encoder",
        lambda *args: lambda text: real(*args)(text) + (300 if "gulls" in text else 0),
    )
    path = write_jsonl(tmp_path / "in.jsonl", ["the sea", "gulls", "the sea"])
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: id \d+ is beyond the vocabulary of 300"):
        run(path, tmp_path / "out", Settings(tokenizer))
    assert run(path, tmp_path / "out", Settings(tokenizer, on_bad_record=OnBadRecord.SKIP)).counts.written == 2


def test_not_under_torchrun(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(DataError, match="started by torchrun, once a process"):
        run(write_jsonl(tmp_path / "in.jsonl", ["x"]), tmp_path / "out", Settings(tokenizer))
