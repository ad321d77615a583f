"""Preprocessing in shards: the bytes of one run without shards, by any division; damage and changes are named."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import Input, find_inputs
from megalaunch.data.preprocess.preprocess import Result, preprocess
from megalaunch.data.preprocess.settings import Format, MaxBad, OnBadRecord, Settings
from megalaunch.data.preprocess.shards.divide import Shard, divide
from megalaunch.data.preprocess.shards.write import merge_shards, open_parts, write_shard
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def settings(tokenizer_path) -> Settings:
    return Settings(tokenizer=tokenizer_path, append_eod=True, chunk_bytes=500)


def shard(inputs: list[str], prefix: Path, settings: Settings, number: int, count: int) -> Result | None:
    with TokenizerLoader.start(settings.tokenizer, settings.merges, settings.tiktoken) as loader:
        return write_shard(inputs, prefix, settings, (number, count), lambda counts: None, lambda text: None, loader)


def whole(inputs: list[str], prefix: Path, settings: Settings) -> Result:
    return preprocess(inputs, prefix, settings, lambda counts: None)


def in_shards(inputs: list[str], prefix: Path, settings: Settings, count: int) -> Result:
    for number in reversed(range(count)):  # the order of the tasks does not matter
        assert shard(inputs, prefix, settings, number, count) is not None
    return merge_shards(inputs, prefix, settings, count)


def token_bytes(result: Result) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for prefix in result.prefixes for suffix in (".bin", ".idx")]


def report_of(result: Result) -> dict:
    report = json.loads(result.report.read_text())
    del report["counts"]["seconds"]
    outputs = report.pop("outputs")
    return report | {"outputs": list(outputs.values())}


def corpus(folder: Path) -> list[str]:
    """A large jsonl file, small ones, a compressed one and a text."""
    import gzip

    write_jsonl(folder / "a.jsonl", sentences(120))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()[:3000].rpartition(b"\n")[0]))
    write_jsonl(folder / "c.jsonl", sentences(3))
    (folder / "d.txt").write_text("\n".join(sentences(9)))
    write_jsonl(folder / "e.jsonl", sentences(40))
    return [str(folder / name) for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl", "d.txt", "e.jsonl")]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_files_and_the_report_are_those_of_one_run(tmp_path, settings, count):
    inputs = corpus(tmp_path)
    alone = whole(inputs, tmp_path / "alone", settings)
    merged = in_shards(inputs, tmp_path / "merged", settings, count)
    assert token_bytes(merged) == token_bytes(alone)
    assert report_of(merged) == report_of(alone)
    assert merged.counts.tokens == alone.counts.tokens
    assert not list(tmp_path.glob(".merged*"))


def test_bad_records_keep_their_lines_and_their_order(tmp_path, tokenizer_path):
    settings = Settings(tokenizer_path, chunk_bytes=300, on_bad_record=OnBadRecord.QUARANTINE, json_keys=("text", "t2"))
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"text": text, "t2": text[:9]}) for text in sentences(60)]
    for number in (3, 29, 30, 41, 59):
        lines[number] = "{nonsense"
    path.write_text("\n".join(lines))
    alone = whole([str(path)], tmp_path / "alone", settings)
    merged = in_shards([str(path)], tmp_path / "merged", settings, 4)
    assert [record["line"] for record in alone.bad_records] == [4, 30, 31, 42, 60]
    assert token_bytes(merged) == token_bytes(alone)
    assert report_of(merged) == report_of(alone)
    assert merged.quarantine.read_bytes() == alone.quarantine.read_bytes()
    assert merged.counts.tokens == alone.counts.tokens
    in_shards([str(path)], tmp_path / "merged", replace(settings, on_bad_record=OnBadRecord.SKIP), 4)
    assert not merged.quarantine.exists()


def test_a_bad_record_that_stops_a_shard_is_named_by_its_line(tmp_path, settings):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(40))
    path.write_text(path.read_text() + "{nonsense\n")
    with pytest.raises(DataError, match=r"in\.jsonl, line 41: "):
        shard([str(path)], tmp_path / "out", settings, 2, 3)


def test_the_limits_of_bad_records_are_those_of_all_shards(tmp_path, settings):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps({'text': text})}\n{{bad\n" for text in sentences(20)))
    for limit in (MaxBad(count=19), MaxBad(share=0.49)):
        limited = replace(settings, on_bad_record=OnBadRecord.SKIP, max_bad=limit)
        with pytest.raises(DataError, match=f"--max-bad allows {limit}"):
            in_shards([str(path)], tmp_path / f"out{limit}", limited, 2)
    allowed = replace(settings, on_bad_record=OnBadRecord.SKIP, max_bad=MaxBad(count=20))
    assert in_shards([str(path)], tmp_path / "out", allowed, 2).counts.skipped == 20


def test_a_shard_without_a_valid_record_is_merged(tmp_path, settings):
    path = tmp_path / "in.jsonl"
    path.write_text("{bad\n" * 50 + json.dumps({"text": "good"}) + "\n")
    skip = replace(settings, on_bad_record=OnBadRecord.SKIP)
    alone = whole([str(path)], tmp_path / "alone", skip)
    assert token_bytes(in_shards([str(path)], tmp_path / "merged", skip, 3)) == token_bytes(alone)


def test_only_missing_and_damaged_parts_are_written_again(tmp_path, settings):
    inputs = corpus(tmp_path)
    for number in (0, 1, 3):
        shard(inputs, tmp_path / "out", settings, number, 4)
    parts = open_parts(inputs, tmp_path / "out", settings, 4)
    assert parts.missing() == [2]
    damaged = parts.finals(1)[0].with_name(f"{parts.finals(1)[0].name}.bin")
    content = bytearray(damaged.read_bytes())
    content[5] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(
        DataError, match=r"2 of 4 shards cannot be merged: shard 1: .*\.bin: byte 5 .*; shard 2: missing"
    ):
        merge_shards(inputs, tmp_path / "out", settings, 4)
    assert not list(tmp_path.glob("out*"))
    assert parts.missing() == [1, 2]
    assert shard(inputs, tmp_path / "out", settings, 0, 4) is None
    for number in parts.missing():
        shard(inputs, tmp_path / "out", settings, number, 4)
    alone = whole(inputs, tmp_path / "alone", settings)
    assert token_bytes(merge_shards(inputs, tmp_path / "out", settings, 4)) == token_bytes(alone)


def test_what_differs_between_shards_is_refused(tmp_path, settings):
    path = write_jsonl(tmp_path / "in.jsonl", sentences(40))
    inputs, prefix = [str(path)], tmp_path / "out"
    shard(inputs, prefix, settings, 0, 2)
    other = small_tokenizer(tmp_path / "other.json", 280)
    fix = "Give the same again, or remove this folder to start from the beginning"
    for changed, count, cause in (
        (replace(settings, tokenizer=other), 2, "other tokenizer"),
        (replace(settings, append_eod=False), 2, "other settings"),
        (settings, 3, "a division into 2 shards, not 3"),
    ):
        with pytest.raises(DataError, match=f"its parts were made from {cause}. {fix}"):
            shard(inputs, prefix, changed, 1, count)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=rf"other inputs: {path} has changed since\. {fix}"):
        shard(inputs, prefix, settings, 1, 2)
    with pytest.raises(DataError, match="has changed since"):
        merge_shards(inputs, prefix, settings, 2)


def test_too_many_shards_are_refused_with_the_largest_number(tmp_path, settings):
    inputs = [str(write_jsonl(tmp_path / "in.jsonl", ["one", "two", "three"]))]
    with pytest.raises(DataError, match=r"8 shards are too many: .* Give --shards 2 or less"):
        open_parts(inputs, tmp_path / "out", settings, 8)
    assert not list(tmp_path.glob(".out*"))
    assert len(divide(find_inputs(inputs, Format.AUTO), 2)) == 2
    with pytest.raises(DataError, match="standard input cannot be divided"):
        open_parts(["-"], tmp_path / "out", settings, 2)


@hypothesis_settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.lists(st.integers(0, 90), max_size=12), min_size=1, max_size=5), count=st.integers(1, 6))
@example(sizes=[[], [0]], count=2)  # an empty file is no shard
@example(sizes=[[5], [], [], [5]], count=3)
def test_every_byte_is_in_one_shard_and_no_line_is_split(tmp_path_factory, sizes, count):
    folder = tmp_path_factory.mktemp("inputs")
    for number, lines in enumerate(sizes):
        (folder / f"{number}.jsonl").write_text("".join("x" * size + "\n" for size in lines))
    inputs = find_inputs([str(folder / "*.jsonl")], Format.AUTO)
    with contextlib.suppress(DataError):
        shards = divide(inputs, count)
        check_shards(shards, inputs, count)


def check_shards(shards: list[Shard], inputs: list[Input], count: int) -> None:
    assert len(shards) == count
    read = b""
    for part in shards:
        assert part.size > 0 or count == 1
        for number, entry in enumerate(part.inputs):
            first = part.start if number == 0 else 0
            last = part.end if entry is part.inputs[-1] else entry.size
            content = entry.path.read_bytes()[first:last]
            assert not content or content.endswith(b"\n")
            read += content
    assert read == b"".join(entry.path.read_bytes() for entry in inputs)
    assert [entry for part in shards for entry in part.hashed] == inputs
