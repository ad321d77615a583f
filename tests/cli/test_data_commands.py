"""`megalaunch data` and `megalaunch tokenizer` as a user meets them."""

import gzip
import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import sentences, small_tokenizer, write_jsonl, write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset import block_hashes
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.indexed_dataset.merge import merge, split
from megalaunch.data.indexed_dataset.report import check_report
from megalaunch.data.indexed_dataset.verify import verify
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.tokenizer.tokenizer import load_tokenizer


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = "from megalaunch.cli.main import main; main()"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx")]


@pytest.fixture
def made(tmp_path) -> Path:
    """The prefix of a preprocessed corpus, its report beside it."""
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    path = write_jsonl(tmp_path / "in.jsonl", ["", *sentences(60)])
    chosen = Settings(tokenizer, append_eod=True)
    return preprocess([str(path)], tmp_path / "out", chosen, lambda progress: None).prefixes[0]


def test_inspect(made, tmp_path):
    done = run("data", "inspect", made, "--documents", 2, "--png", tmp_path / "lengths.png")
    assert done.returncode == 0, done.stderr
    read = IndexedTokens(made)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"61 documents, 60 sequences, {read.num_tokens:,} tokens of uint16 (")
    assert lines[1].startswith(f"a document: 0 to {max(read.lengths):,} tokens, {read.num_tokens / 61:,.1f} on average")
    bins = [line for line in lines if " tokens  " in line and line.startswith(" ")]
    assert sum(int(line.split()[-1].replace(",", "")) for line in bins) == 61
    assert bins[0].split()[0] == "0"
    assert "--- document 0: 0 tokens in 0 sequences: " in lines
    assert sentences(1)[0] + "<|endoftext|>" in done.stdout
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"


def test_inspect_without_a_tokenizer_shows_ids(tmp_path):
    done = run("data", "inspect", write_tokens(tmp_path / "x", [[1, 2, 3]]))
    assert "showing ids: the tokenizer is unknown (give --tokenizer)" in done.stdout
    assert "--- document 0: 3 tokens in 1 sequence: 1 2 3\n" in done.stdout


def test_verify(made, tmp_path):
    done = run("data", "verify", made)
    assert done.returncode == 0, done.stderr
    assert "valid. 61 documents, 60 sequences" in done.stdout
    assert "all checksums match" in done.stdout
    done = run("data", "verify", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no such file" in done.stderr


def quiet(done: int, total: int) -> None: ...


def test_verify_finds_a_flipped_bit_and_ids_beyond_the_vocabulary(made, tmp_path):
    path = Path(f"{made}.bin")
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    read = IndexedTokens(made)  # a sequence a document; the first document has none
    document = max(number for number in range(60) if read.first_token(number) <= 50)
    token = 50 - read.first_token(document)
    place = rf"byte 100 \(document {document + 1}, token {token}\)"
    said = f"{place} is 0x{good[100] ^ 1:02x}; 0x{good[100]:02x} was written"
    with pytest.raises(DataError, match=rf"out_text_document\.bin: {said}"):
        verify(made, None, quiet)
    path.write_bytes(good[:100] + bytes(byte ^ 1 for byte in good[100:103]) + good[103:])
    said = r"bytes 0 to [\d,]+ \(document 1, token 0, to document 60, token \d+\) differ from the written ones"
    with pytest.raises(DataError, match=rf"out_text_document\.bin: {said}"):
        verify(made, None, quiet)
    path.write_bytes(good[:-2])
    with pytest.raises(DataError, match=rf"bin: it has {len(good) - 2:,} bytes; {len(good):,} were written"):
        verify(made, None, quiet)
    path.write_bytes(good)
    index = Path(f"{made}.idx")
    kept = index.read_bytes()
    index.write_bytes(kept[:40] + bytes([kept[40] ^ 128]) + kept[41:])
    with pytest.raises(DataError, match=rf"idx: byte 40 is 0x{kept[40] ^ 128:02x}; 0x{kept[40]:02x} was written"):
        verify(made, None, quiet)
    prefix = write_tokens(tmp_path / "x", [[1, 2, 3], [], [4, 5, 600, 7]])
    assert verify(prefix, 601, quiet).largest == 600
    assert not verify(prefix, None, quiet).hashed
    cause = r"x\.bin: id 600 of document 2, token 2 is outside the vocabulary of 600"
    with pytest.raises(DataError, match=cause):
        verify(prefix, 600, quiet)
    done = run("data", "verify", prefix, "--vocab-size", 600)
    assert (done.returncode, "id 600 of document 2" in done.stderr) == (3, True)


def test_verify_without_a_vocabulary_does_not_say_valid(tmp_path):
    prefix = write_tokens(tmp_path / "x", [[1, 65_292]], vocab_size=65_500)
    done = run("data", "verify", prefix)
    assert (done.returncode, "valid" in done.stdout) == (0, False)
    assert " 2 tokens, largest id 65,292; not compared: ids" in done.stdout
    said = "not compared: ids (unknown vocabulary size: give --tokenizer or --vocab-size), bytes (no report"
    assert said in done.stdout


@pytest.mark.parametrize("sequences", [[], [[]]])
def test_verify_names_no_largest_id_without_tokens(tmp_path, sequences):
    prefix = write_tokens(tmp_path / "x", sequences)
    assert verify(prefix, 600, quiet).largest is None
    done = run("data", "verify", prefix, "--vocab-size", 600)
    assert done.returncode == 0, done.stderr
    assert " 0 tokens; not compared: bytes" in done.stdout
    assert "largest id" not in done.stdout


def test_verify_knows_the_vocabulary_of_a_prepared_corpus(tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json", 320)
    prefix = write_tokens(tmp_path / "train", [[1, 2], [3, 65_292]], vocab_size=65_500)
    with pytest.raises(DataError, match="id 65,292 of document 1, token 1 is outside the vocabulary of 3"):
        verify(prefix, None, quiet)


@pytest.mark.parametrize("place", [0, 1, 65_520, 65_521, 65_522, 999_999, 1_048_576, 1_500_000, 2_097_151, 2_500_000])
def test_an_altered_byte_is_found_wherever_it_is(tmp_path, monkeypatch, place):
    """Over several blocks of two pieces; Adler-32 alone cannot tell bytes 65,521 apart from each other."""
    monkeypatch.setattr(block_hashes, "BLOCK", 2 * block_hashes.PIECE)
    path = tmp_path / "x"
    content = bytearray(np.random.default_rng(place).bytes(2_600_001))
    path.write_bytes(content)
    described = block_hashes.describe(path)
    assert block_hashes.find_altered(path, described) is None
    before, content[place] = content[place], (content[place] + 77) % 256
    path.write_bytes(content)
    assert block_hashes.find_altered(path, described) == block_hashes.Altered(place, place, before)


def test_files_of_earlier_reports_are_found_altered_by_the_block(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    described = {key: value for key, value in block_hashes.describe(path).items() if key != "adler32"}
    path.write_bytes(b"abd")
    assert block_hashes.find_altered(path, described) == block_hashes.Altered(0, 2)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=3), min_size=1, max_size=20),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_merging_shards_equals_one_pass(tmp_path_factory, documents, cuts):
    """For any cut of the text into shards; empty shards, empty documents and several sentences included."""
    folder = tmp_path_factory.mktemp("shards")
    texts = [[" ".join(f"w{token}" for token in sentence) for sentence in document] for document in documents]
    lines = [json.dumps({"text": document}) + "\n" for document in texts]
    tokenizer = small_tokenizer(folder / "tokenizer.json", 270)
    borders = sorted({0, len(lines), *(cut for cut in cuts if cut < len(lines))})
    prefixes = []
    for number, (first, last) in enumerate(pairwise(borders)):
        (folder / f"{number}.jsonl").write_text("".join(lines[first:last]))
        chosen = Settings(tokenizer, append_eod=True)
        made = preprocess([str(folder / f"{number}.jsonl")], folder / f"part{number}", chosen, lambda progress: None)
        prefixes.append(made.prefixes[0])
    (folder / "all.jsonl").write_text("".join(lines))
    whole = preprocess(
        [str(folder / "all.jsonl")], folder / "whole", Settings(tokenizer, append_eod=True), lambda p: None
    )
    merge(prefixes, folder / "merged")
    assert content(folder / "merged") == content(whole.prefixes[0])
    parts = split(whole.prefixes[0], folder / "cut", [3, 1, 0, 2])
    assert sum(IndexedTokens(part).num_documents for part in parts) == len(documents)
    merge(parts, folder / "again")
    assert content(folder / "again") == content(whole.prefixes[0])


def test_merge_and_split_commands(made, tmp_path):
    done = run("data", "split", made, "--output-prefix", tmp_path / "parts" / "p", "--shares", "9,1")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[1].split(",")[0] for line in done.stdout.splitlines()] == [" 55 documents", " 6 documents"]
    done = run("data", "merge", tmp_path / "parts", "--output-prefix", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "merged") == content(made)
    (tmp_path / "merged.idx").unlink()
    (tmp_path / "merged.bin").write_bytes(b"of an experiment")
    done = run("data", "merge", tmp_path / "parts", "--output-prefix", tmp_path / "merged")
    refusal = f"{tmp_path}/merged.bin: it exists. Give another --output-prefix, or --overwrite to replace it.\n"
    assert (done.returncode, done.stderr) == (3, refusal)
    assert (tmp_path / "merged.bin").read_bytes() == b"of an experiment"
    done = run("data", "merge", tmp_path / "parts", "--output-prefix", tmp_path / "merged", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "merged") == content(made)
    words = ("data", "split", made, "--output-prefix", tmp_path / "parts" / "p", "--parts", 2)
    before = content(tmp_path / "parts" / "p_0")
    assert (run(*words).returncode, content(tmp_path / "parts" / "p_0")) == (3, before)
    assert run(*words, "--overwrite").returncode == 0
    assert content(tmp_path / "parts" / "p_0") != before
    for arguments, cause in (
        (["--shares", "a"], "must be numbers"),
        ([], "--shares or --parts"),
        (["--shares", "0"], "above 0"),
    ):
        done = run("data", "split", made, "--output-prefix", tmp_path / "q", *arguments)
        assert (done.returncode, cause in done.stderr) == (2, True)


def test_split_refuses_to_replace_its_source(tmp_path):
    """Part 0 would replace the file that the parts after it are read from."""
    source = write_tokens(tmp_path / "a_0", [[1], [2]])
    with pytest.raises(DataError, match=r"a_0: it is both source and target\. Choose another --output-prefix"):
        split(source, tmp_path / "a", [1, 1])
    assert IndexedTokens(source).num_documents == 2


def test_merge_refuses_what_does_not_fit(tmp_path):
    first, second = write_tokens(tmp_path / "a", [[1]]), write_tokens(tmp_path / "b", [[1]], vocab_size=70_000)
    with pytest.raises(DataError, match=r"b: its tokens are int32, but those of .*a are uint16"):
        merge([first, second], tmp_path / "c")
    with pytest.raises(DataError, match="both source and target"):
        merge([first, second.with_name("a")], first)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the directory has no token files"):
        merge([tmp_path / "empty"], tmp_path / "c")
    assert not list(tmp_path.glob("*c.*"))


def test_merged_and_split_files_have_reports(made, tmp_path):
    parts = split(made, tmp_path / "part", [2, 1])
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "all.json").write_text('{"tokenizer": {"vocabulary_sha256": "of other files"}}')
    merge(parts, tmp_path / "all")
    for prefix in (*parts, tmp_path / "all"):
        read = IndexedTokens(prefix)
        said = f"{prefix.name}: {read.num_documents} documents, {read.num_tokens:,} tokens (preprocessed from 1 file)"
        assert check_report(prefix, tokenizer) == said
        assert verify(prefix, None, lambda done, total: None).hashed
    other = preprocess(
        [str(tmp_path / "in.jsonl")],
        tmp_path / "other",
        Settings(small_tokenizer(tmp_path / "other.json", 280)),
        lambda progress: None,
    ).prefixes[0]
    with pytest.raises(DataError, match=r"other_text_document: it is from another tokenizer than .*part_0"):
        merge([*parts, other], tmp_path / "mixed")
    assert not (tmp_path / "mixed.idx").exists()
    Path(f"{parts[0]}.json").unlink()
    merge(parts, tmp_path / "all", overwrite=True)  # what the parts are is no longer known of all
    assert not (tmp_path / "all.json").exists()


def test_every_key_has_its_report(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"a": text, "b": "sea"}) + "\n" for text in sentences(30)))
    chosen = Settings(tokenizer, json_keys=("a", "b"))
    for prefix in preprocess([str(tmp_path / "in.jsonl")], tmp_path / "out", chosen, lambda progress: None).prefixes:
        read = IndexedTokens(prefix)
        assert f"30 documents, {read.num_tokens:,} tokens" in check_report(prefix, load_tokenizer(tokenizer))
        assert verify(prefix, None, lambda done, total: None).hashed
    write_tokens(prefix, [[1, 2]])
    with pytest.raises(DataError, match=r"it has 4 bytes, its report says .*: the file was replaced"):
        check_report(prefix, load_tokenizer(tokenizer))


def test_the_report_is_checked_against_the_tokenizer(made, tmp_path):
    line = check_report(made, load_tokenizer(tmp_path / "tokenizer.json"))
    assert (
        line == f"out_text_document: 61 documents, {IndexedTokens(made).num_tokens:,} tokens (preprocessed from 1 file)"
    )
    other = load_tokenizer(small_tokenizer(tmp_path / "other.json", 280))
    with pytest.raises(DataError, match=r"are from another tokenizer \(.*tokenizer\.json\)\. Set tokenizer\.path"):
        check_report(made, other)
    assert check_report(tmp_path / "none", other) is None


def test_tokenizer_train_and_inspect(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", sentences(300))
    arguments = (tmp_path / "in.jsonl", "--vocab-size", 300)
    done = run("tokenizer", "train", *arguments, "--output", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/a.json: 300 tokens, trained on 0.0 million characters")
    assert run("tokenizer", "train", *arguments, "--output", tmp_path / "b.json").returncode == 0
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    done = run("tokenizer", "inspect", tmp_path / "a.json", "--text", "the sea")
    assert "BPE, 300 tokens, stored as uint16\nend of document: <|endoftext|> (0)\n" in done.stdout
    assert "preprocess encodes with" in done.stdout
    assert done.stdout.splitlines()[-1].split(" tokens: ")[0].isdigit()
    (tmp_path / "in.jsonl").write_text("")
    done = run("tokenizer", "train", *arguments, "--output", tmp_path / "c.json")
    assert (done.returncode, "no text to learn from" in done.stderr) == (3, True)
    assert not list(tmp_path.glob("*c.json*"))


def train(path: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return run("tokenizer", "train", path, "--vocab-size", 300, "--output", output)


@pytest.mark.parametrize(("keep", "line"), [(-20, ", line "), (40, ", line 1: ")])
def test_a_tokenizer_is_not_trained_on_the_rest_of_a_damaged_file(tmp_path, keep, line):
    """Whether a part of it can be read, or nothing."""
    path, output = tmp_path / "in.jsonl.gz", tmp_path / "a.json"
    texts = write_jsonl(tmp_path / "in.jsonl", [random.Random(1).randbytes(1 << 20).hex(), *sentences(300)])
    path.write_bytes(gzip.compress(texts.read_bytes() * 3)[:keep])
    done = train(path, output)
    assert (done.returncode, done.stdout) == (3, "")
    given = ("--output-prefix", tmp_path / "out", "--tokenizer", small_tokenizer(tmp_path / "tokenizer.json"))
    said = run("preprocess", path, *given).stderr
    assert f"{path}{line}" in said
    assert (", line 1: " in said) == (keep > 0)
    cause = said.splitlines()[-1]  # after a note, where gigatoken is missing
    assert done.stderr.strip() == cause.removesuffix(" To leave such records out: --on-bad-record skip.")
    assert not output.exists()


def test_records_that_a_tokenizer_is_not_trained_on_are_counted(tmp_path):
    good, output = write_jsonl(tmp_path / "good.jsonl", sentences(30)).read_text(), tmp_path / "a.json"
    path = tmp_path / "in.jsonl"
    path.write_text(good + "{broken\n" + good + '{"txet": "x"}\n')
    done = train(path, output)
    assert done.returncode == 0, done.stderr
    assert f"note: 2 of 62 records left out, the first: {path}, line 31: no JSON (" in done.stdout
    assert "left out" not in train(tmp_path / "good.jsonl", output).stdout
    output.unlink()
    path.write_text('{"txet": "x"}\n' * 3)
    done = train(path, output)
    assert done.returncode == 3
    cause = f'none of the 3 records can be used, the first: {path}, line 1: the record has no key "text".'
    assert f"{cause} Its keys are txet: name the one with the text" in done.stderr
    assert not output.exists()
