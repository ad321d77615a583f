"""Corpus to token files: right sides, right tokens, the same bytes, once, whatever is killed meanwhile."""

import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tokenizers
from token_files import sentences, small_tokenizer, write_jsonl, write_tokens

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.prepare import PreparedData, prepare
from megalaunch.data.preprocess.corpus import build as build_corpus
from megalaunch.data.preprocess.corpus import documents as corpus_module
from megalaunch.data.preprocess.corpus.build import is_validation
from megalaunch.data.preprocess.corpus.documents import find_corpus
from megalaunch.data.preprocess.encoder_pool import EncoderPool
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.tokenizer.tokenizer import load_tokenizer, train_tokenizer
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

FILES = ["train.bin", "train.idx", "validation.bin", "validation.idx", "tokenizer.json"]
SMALL = TokenizerSpec(vocab_size=300)


def run(data: DataSpec, tokenizer: TokenizerSpec = SMALL) -> tuple[PreparedData, list[str]]:
    lines: list[str] = []
    return prepare(data, tokenizer, lines.append), lines


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", [*sentences(200), ""])
    return DataSpec(corpus=str(corpus), validation_every=5, cache_directory=str(tmp_path / "cache"))


def hashes(prepared: PreparedData) -> dict[str, str]:
    folder = prepared.train_prefix.parent
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}


def texts_of(prefix: Path, tokenizer: Path) -> list[str]:
    tokens, loaded = IndexedTokens(prefix), load_tokenizer(tokenizer)
    return [loaded.decode(tokens.tokens(number).tolist()) for number in range(tokens.num_sequences)]


def test_validation_is_chosen_by_the_hash_of_the_name():
    digest = int(hashlib.sha256(b"json/decoder.py").hexdigest(), 16)
    assert is_validation("json/decoder.py", 20) is (digest % 20 == 0)
    chosen = [number for number in range(2000) if is_validation(f"x:{number}", 20)]
    assert 60 < len(chosen) < 140
    assert all(is_validation(f"x:{number}", 1) for number in range(9))
    assert not any(is_validation(f"x:{number}", 0) for number in range(9))


def test_every_document_is_on_its_side_and_whole(data):
    prepared, lines = run(data)
    documents = list(find_corpus(data.corpus, "text").documents())
    sides = {side: [d.text for d in documents if is_validation(d.name, 5) is side] for side in (False, True)}
    assert texts_of(prepared.train_prefix, prepared.tokenizer_path) == [text for text in sides[False] if text]
    assert prepared.validation_prefix is not None
    assert texts_of(prepared.validation_prefix, prepared.tokenizer_path) == [text for text in sides[True] if text]
    assert (prepared.documents, prepared.validation_documents) == (len(sides[False]), len(sides[True]))
    train, validation = IndexedTokens(prepared.train_prefix), IndexedTokens(prepared.validation_prefix)
    assert (prepared.train_tokens, prepared.validation_tokens) == (train.num_tokens, validation.num_tokens)
    assert prepared.eod_id == 0
    assert all(train.tokens(number)[-1] == 0 for number in range(train.num_sequences))
    assert (train.stream == 0).sum() == train.num_sequences
    assert train.dtype.name == "uint16"
    assert prepared.vocab_size == 300 == load_tokenizer(prepared.tokenizer_path).vocab_size
    assert lines[0].endswith("corpus.jsonl: 1 file, 0.0 MB")
    told = [line for line in lines[1:] if "gigatoken is not installed" not in line]
    assert told == ["training a tokenizer of 300 tokens", "encoding the documents"]


def test_without_end_tokens(data):
    prepared, _ = run(dataclasses.replace(data, append_eod=False))
    assert not (IndexedTokens(prepared.train_prefix).stream == 0).any()


def test_the_tokenizer_never_sees_validation_text(tmp_path):
    texts = ["plain words"] * 40
    name = next(number for number in range(40) if is_validation(f"c.jsonl:{number + 1}", 20))
    texts[name] = "zqzqzqzqzqzq" * 30
    corpus = write_jsonl(tmp_path / "c.jsonl", texts)
    prepared, _ = run(DataSpec(corpus=str(corpus), cache_directory=str(tmp_path / "cache")))
    assert "zq" not in prepared.tokenizer_path.read_text(encoding="utf-8")


def test_the_same_content_gives_the_same_bytes_anywhere(data, tmp_path):
    first, _ = run(data)
    shutil.copytree(tmp_path, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("cache"))
    other = dataclasses.replace(
        data, corpus=str(tmp_path / "elsewhere/corpus.jsonl"), cache_directory=str(tmp_path / "second")
    )
    second, _ = run(other)
    assert first.train_prefix != second.train_prefix
    assert first.train_prefix.parent.name == second.train_prefix.parent.name
    assert hashes(first) == hashes(second)


def test_the_second_call_makes_nothing(data):
    first, _ = run(data)
    stamp = first.tokenizer_path.stat().st_mtime_ns
    second, lines = run(data)
    assert second == first
    assert len(lines) == 1
    assert second.tokenizer_path.stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    "change",
    [
        {"validation_every": 4},
        {"append_eod": False},
        {"json_key": "body"},
        {"on_bad_record": "skip"},
        {"corpus": None},
    ],
    ids=["validation", "eod", "key", "bad records", "one byte"],
)
def test_whatever_matters_gives_other_files(data, change):
    first, _ = run(data)
    corpus = Path(data.corpus)
    if change == {"corpus": None}:
        stat = corpus.stat()
        corpus.write_bytes(corpus.read_bytes().replace(b"sea", b"tea", 1))
        os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # neither size nor time tells
        change = {}
    elif "json_key" in change:
        write_jsonl(corpus, sentences(200), key="body")
    second, _ = run(dataclasses.replace(data, **change))
    assert second.train_prefix != first.train_prefix


def test_bad_records_end_it_or_are_left_out(data):
    corpus = Path(data.corpus)
    whole, _ = run(dataclasses.replace(data, validation_every=0))
    lines = corpus.read_bytes().splitlines(keepends=True)
    corpus.write_bytes(b"".join([*lines[:3], b"{nonsense\n", *lines[3:9], b'{"other": "x"}\n', *lines[9:]]))
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 4: no JSON"):
        run(dataclasses.replace(data, validation_every=0))
    left, said = run(dataclasses.replace(data, validation_every=0, on_bad_record="skip"))
    assert any(line.startswith(f"note: 2 records left out, the first: {corpus}, line 4: no JSON") for line in said)
    assert hashes(left) == hashes(whole)


def test_the_fast_engine_writes_the_same_files(data, monkeypatch):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    fast, said = run(data)
    assert "encoding the documents" in said
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    slow, said = run(dataclasses.replace(data, cache_directory=data.cache_directory + "2"))
    assert any("gigatoken is not installed" in line for line in said)
    assert hashes(fast) == hashes(slow)


def test_several_workers_write_the_same_files(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "c.jsonl", ["", *sentences(3000)])
    lines = corpus.read_bytes().splitlines(keepends=True)
    corpus.write_bytes(b"".join([*lines[:1000], b"{nonsense\n", *lines[1000:]]))
    data = DataSpec(corpus=str(corpus), validation_every=3, on_bad_record="skip", cache_directory=str(tmp_path / "one"))
    one, _ = run(data)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(build_corpus, "_BYTES_A_WORKER", 10_000)
    monkeypatch.setattr(corpus_module, "Settings", functools.partial(Settings, chunk_bytes=5000))
    counts, real = [], EncoderPool.__init__
    monkeypatch.setattr(EncoderPool, "__init__", lambda *args: (counts.append(args[1]), real(*args))[1])
    two, _ = run(dataclasses.replace(data, cache_directory=str(tmp_path / "two")))
    assert counts == [2]
    assert hashes(one) == hashes(two)


def test_another_vocabulary_gives_other_files(data):
    first, _ = run(data)
    second, _ = run(data, TokenizerSpec(vocab_size=310))
    assert (first.vocab_size, second.vocab_size) == (300, 310)
    assert first.train_prefix != second.train_prefix


def test_another_key_of_the_same_records_gives_other_files(data):
    lines = [json.dumps({"text": text, "body": text[::-1]}) + "\n" for text in sentences(50)]
    Path(data.corpus).write_text("".join(lines), encoding="utf-8")
    assert run(data)[0].train_prefix != run(dataclasses.replace(data, json_key="body"))[0].train_prefix


def test_other_names_give_other_files(data, tmp_path):
    """The name of a document decides its side."""
    first, _ = run(data)
    renamed = shutil.copy(data.corpus, tmp_path / "other.jsonl")
    assert run(dataclasses.replace(data, corpus=str(renamed)))[0].train_prefix != first.train_prefix


def test_another_version_of_the_tokenizer_library_gives_other_files(data, monkeypatch):
    first, _ = run(data)
    monkeypatch.setattr(tokenizers, "__version__", "0.0")
    assert run(data)[0].train_prefix != first.train_prefix


def test_a_given_tokenizer_is_kept_with_the_files(data, tmp_path):
    given = small_tokenizer(tmp_path / "given.json", 280)
    prepared, lines = run(data, TokenizerSpec(path=str(given)))
    assert prepared.vocab_size == 280
    assert prepared.tokenizer_path.read_bytes() == given.read_bytes()
    assert "training a tokenizer" not in " ".join(lines)
    small_tokenizer(given, 290)
    assert run(data, TokenizerSpec(path=str(given)))[0].train_prefix != prepared.train_prefix


def test_another_end_token_beside_the_same_tokenizer_gives_other_files(data, tmp_path):
    """A base model and its chat model often differ in the `eos_token` of tokenizer_config.json alone."""
    train_tokenizer(sentences(40), 300, tmp_path / "tokenizer.json")
    tokenizer = TokenizerSpec(path=str(tmp_path / "tokenizer.json"))
    base, _ = run(data, tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    tuned, _ = run(data, tokenizer)
    assert tuned.eod_id != base.eod_id
    for prepared in (base, tuned):
        assert IndexedTokens(prepared.train_prefix).tokens(0)[-1] == prepared.eod_id


def test_a_gpt2_vocabulary_is_converted_with_its_merges(data, tmp_path):
    """GPT-2's vocab.json has the token `model`, as a tokenizer.json has the key."""
    merges = [("m", "o"), ("mo", "d"), ("mod", "e"), ("mode", "l")]
    tokens = [chr(point) for point in range(33, 127)] + ["\u0120", "\u010a", *map("".join, merges), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("".join(f"{left} {right}\n" for left, right in merges))
    tokenizer = TokenizerSpec(path=str(tmp_path / "vocab.json"))
    first, _ = run(data, tokenizer)
    assert first.vocab_size == len(tokens)
    (tmp_path / "merges.txt").write_text("")
    assert run(data, tokenizer)[0].train_prefix != first.train_prefix  # other merges give other ids


def test_a_corpus_too_small_for_the_vocabulary(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", ["ab ab ab"])
    data = DataSpec(corpus=str(corpus), validation_every=0, cache_directory=str(tmp_path / "cache"))
    prepared, lines = run(data, TokenizerSpec(vocab_size=4096))
    assert 257 < prepared.vocab_size < 270
    assert f"note: the corpus is too small for 4,096 tokens, it gave {prepared.vocab_size}" in lines


def test_no_validation_document(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", ["few words", "in two lines"])
    data = DataSpec(corpus=str(corpus), validation_every=10**9, cache_directory=str(tmp_path / "cache"))
    for _ in range(2):  # said again when the files are found in the cache
        prepared, lines = run(data)
        assert prepared.validation_prefix is None
        assert (prepared.documents, prepared.validation_documents, prepared.validation_tokens) == (2, 0, 0)
        assert lines[-1].startswith("note: no document falls to validation, the run goes without")
    _, lines = run(dataclasses.replace(data, validation_every=0))
    assert not any("falls to validation" in line for line in lines)


def test_no_training_document(data, tmp_path):
    with pytest.raises(DataError, match=r"no document is left for training: data\.validation_every=1 took all of them"):
        run(dataclasses.replace(data, validation_every=1))
    assert not list((tmp_path / "cache" / "corpora").glob("[!.]*"))


@pytest.mark.parametrize("content", ["", '{"text": ""}\n' * 30])
def test_an_empty_corpus(data, content):
    Path(data.corpus).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"corpus\.jsonl: the corpus is empty: its files hold no text"):
        run(data)


def test_errors_of_the_settings(data, tmp_path):
    with pytest.raises(DataError, match=r"there is nothing to train on\. Set data\.corpus=FILE"):
        run(DataSpec())
    with pytest.raises(DataError, match=r"nowhere\.json: cannot read it: No such file or directory"):
        run(data, TokenizerSpec(path=str(tmp_path / "nowhere.json")))
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        run(data, TokenizerSpec(path=str(bad)))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write the data cache here: .*data\.cache_directory=PATH"):
        run(dataclasses.replace(data, cache_directory=str(tmp_path / "file")))


def test_a_tokenizer_without_an_end_token(data, tmp_path):
    path = small_tokenizer(tmp_path / "given.json")
    path.write_text(path.read_text(encoding="utf-8").replace("<|endoftext|>", "<|other|>"), encoding="utf-8")
    with pytest.raises(DataError, match=r"no end-of-document token .*Set data\.append_eod=false"):
        run(data, TokenizerSpec(path=str(path)))
    prepared, _ = run(dataclasses.replace(data, append_eod=False), TokenizerSpec(path=str(path)))
    assert prepared.eod_id is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["removed", "cut"])
def test_damaged_cached_files_are_made_anew(data, name, harm):
    prepared, _ = run(data)
    before = hashes(prepared)
    file = prepared.train_prefix.parent / name
    if harm == "removed":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    again, lines = run(data)
    assert again == prepared
    assert "encoding the documents" in lines
    assert hashes(again) == before
    assert sorted(path.name for path in file.parent.iterdir()) == sorted(FILES)


def test_a_failed_build_leaves_nothing(data, tmp_path):
    with Path(data.corpus).open("a", encoding="utf-8") as file:
        file.write("nonsense\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 202: no JSON"):
        run(data)
    assert [path.name[-5:] for path in (tmp_path / "cache" / "corpora").iterdir()] == [".lock"]


def _prepare_and_tell(data: DataSpec, queue: multiprocessing.Queue) -> None:
    lines: list[str] = []
    prepared = prepare(data, TokenizerSpec(vocab_size=600), lines.append)
    queue.put((hashes(prepared), lines))


def test_several_at_once_all_pass(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", sentences(3000))
    data = DataSpec(corpus=str(corpus), cache_directory=str(tmp_path / "cache"))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_prepare_and_tell, args=(data, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert sum("encoding the documents" in lines for _, lines in answers) == 1


def test_a_killed_one_does_not_matter(tmp_path):
    corpus = write_jsonl(tmp_path / "c.jsonl", sentences(20_000))
    data = DataSpec(corpus=str(corpus), cache_directory=str(tmp_path / "cache"))
    program = (
        "import sys; from megalaunch.data.prepare import *;"
        "prepare(DataSpec(corpus=sys.argv[1], cache_directory=sys.argv[2]), TokenizerSpec(vocab_size=300),"
        " lambda line: print(line, flush=True))"
    )
    command = [sys.executable, "-c", program, str(corpus), data.cache_directory]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "encoding the documents\n" in process.stdout, "read up to that line"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    root = tmp_path / "cache" / "corpora"
    assert not list(root.glob("[!.]*"))
    assert len(list(root.glob(".unfinished-*"))) == 1
    prepared, _ = run(data)
    assert prepared.documents + prepared.validation_documents == 20_000
    assert not list(root.glob(".unfinished-*"))


def test_the_standard_library_is_prepared_fast_and_found_fast(tmp_path):
    data = DataSpec(corpus="python-stdlib", cache_directory=str(tmp_path))
    started = time.monotonic()
    first, _ = run(data, TokenizerSpec(vocab_size=4096))
    middle = time.monotonic()
    second, _ = run(data, TokenizerSpec(vocab_size=4096))
    assert first == second
    assert first.vocab_size == 4096
    assert first.train_tokens > 1_000_000
    assert 0.01 < first.validation_tokens / first.train_tokens < 0.15
    # 3.7 s and 0.1 s on two idle cores; the borders leave room for a busy machine.
    assert middle - started < 40
    assert time.monotonic() - middle < 2


def test_tokenizer_training_is_deterministic(tmp_path):
    texts = [text + str(number % 17) for number, text in enumerate(sentences(3000))]
    contents = set()
    for number in range(4):
        train_tokenizer(iter(texts), 700, tmp_path / f"{number}.json")
        contents.add((tmp_path / f"{number}.json").read_bytes())
    assert len(contents) == 1


def test_the_tokenizer_round_trips_any_text(tmp_path):
    tokenizer = load_tokenizer(small_tokenizer(tmp_path / "tokenizer.json"))
    for text in ("the old sea", "  x\n\ty\r\n", "\u00e4\u20ac\U0001f600\x00\x7f", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_batch([text, text]) == [tokenizer.encode(text)] * 2
    assert load_tokenizer(tmp_path).vocab_size == 300  # the folder of a tokenizer.json does too


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "no such file"), (b"\xff\xfe", "not a tokenizer file"), (b"{1", "not a tokenizer.json")],
)
def test_a_tokenizer_that_is_none(tmp_path, content, cause):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"t\.json: {cause}"):
        load_tokenizer(path)


def test_given_token_files(tmp_path):
    tokenizer = TokenizerSpec(path=str(small_tokenizer(tmp_path / "tokenizer.json")))
    train = write_tokens(tmp_path / "a", [[1, 2, 3]] * 10)
    validation = write_tokens(tmp_path / "b", [[4, 5]] * 3)
    prepared, lines = run(DataSpec(train_prefix=str(train), validation_prefix=str(validation)), tokenizer)
    assert (prepared.train_prefix, prepared.validation_prefix) == (train, validation)
    assert (prepared.documents, prepared.train_tokens) == (10, 30)
    assert (prepared.validation_documents, prepared.validation_tokens) == (3, 6)
    assert (prepared.vocab_size, prepared.eod_id) == (300, 0)
    assert prepared.tokenizer_path == tmp_path / "tokenizer.json"
    assert lines == []


def test_one_given_file_is_split_as_megatron_does(tmp_path):
    tokenizer = TokenizerSpec(path=str(small_tokenizer(tmp_path / "tokenizer.json")))
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3]] * 1000)
    data = DataSpec(train_prefix=str(prefix))
    prepared, lines = run(data, tokenizer)
    assert prepared.validation_prefix == prefix
    assert (prepared.documents, prepared.train_tokens) == (969, 2907)
    assert (prepared.validation_documents, prepared.validation_tokens) == (30, 90)
    assert lines == ["note: no validation files, so a is split 969, 30, 1 as Megatron does"]
    # What was found once holds when the frozen spec is prepared again.
    assert run(dataclasses.replace(data, validation_prefix=str(prefix)), tokenizer)[0] == prepared


def test_a_given_file_too_short_to_share(tmp_path):
    tokenizer = TokenizerSpec(path=str(small_tokenizer(tmp_path / "tokenizer.json")))
    prefix = write_tokens(tmp_path / "a", [[1, 2, 3]] * 5)
    prepared, lines = run(DataSpec(train_prefix=str(prefix)), tokenizer)
    assert prepared.validation_prefix is None
    assert prepared.documents == 5
    assert lines[-1] == "note: there are no tokens for validation, the run has none"
    _, lines = run(DataSpec(train_prefix=str(prefix), split="969,30,1"), tokenizer)
    assert lines[-1] == "note: data.split=969,30,1 leaves no document for validation, the run has none"


def test_given_token_files_need_their_tokenizer(tmp_path):
    prefix = write_tokens(tmp_path / "a", [[1]])
    with pytest.raises(DataError, match=r"without their tokenizer\. Set tokenizer\.path"):
        run(DataSpec(train_prefix=str(prefix)))
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        run(
            DataSpec(train_prefix=str(tmp_path / "none")), TokenizerSpec(path=str(small_tokenizer(tmp_path / "t.json")))
        )
