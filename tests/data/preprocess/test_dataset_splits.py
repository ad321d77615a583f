"""Dataset folders as the Hub and `save_to_disk` lay them out: splits are told apart, and non-data is left out."""

import gzip
import json
from pathlib import Path

import pytest
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.prepare import prepare
from megalaunch.data.preprocess.corpus.documents import find_corpus
from megalaunch.data.preprocess.inputs import find_inputs
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.readers import table_rows
from megalaunch.data.preprocess.settings import Format, Settings
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

CARD = "---\nlicense: mit\n---\n# A data set\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def folder(root: Path, *names: str) -> Path:
    """Files with a record each, whatever their name says; nothing reads them unless it should."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"text": name}) + "\n"
        path.write_bytes(gzip.compress(line.encode()) if name.endswith(".gz") else line.encode())
    return root


def names(root: Path, split: str | None = "train") -> list[str]:
    return [file.name for file in find_corpus(str(root), "text", split).files]


@pytest.mark.parametrize(
    ("files", "train"),
    [
        (["train.jsonl", "test.jsonl", "validation.jsonl", "README.md", "LICENSE"], ["train.jsonl"]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/dev-00000-of-00001.parquet"],
         ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        (["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"], ["train/a.jsonl", "train/b.jsonl"]),
        (["en/c4-train.00000-of-01024.json.gz", "en/c4-validation.00000-of-00008.json.gz"],
         ["en/c4-train.00000-of-01024.json.gz"]),
        (["my_train_set.jsonl", "my-valid.jsonl"], ["my_train_set.jsonl"]),
        (["wikitext-train.arrow", "wikitext-test.arrow", "dataset_info.json"], ["wikitext-train.arrow"]),
        (["wiki.train.raw", "wiki.valid.raw", "wiki.test.raw", "README.md"], ["wiki.train.raw"]),
        (["Training.jsonl", "Testing.jsonl", "extra.jsonl"], ["Training.jsonl"]),
    ],
)  # fmt: skip
def test_the_training_split_is_read(tmp_path, files, train):
    corpus = find_corpus(str(folder(tmp_path, *files)), "text")
    assert [file.name for file in corpus.files] == train
    others = [name for name in files if name not in train]
    assert all(name in " ".join(corpus.notes) for name in others)


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["a.jsonl", "b.parquet", "README.md", "LICENSE", "dataset_infos.json", "load.py"], ["a.jsonl", "b.parquet"]),
        (["train-00000-of-00001.parquet", "README.md"], ["train-00000-of-00001.parquet"]),
        (["validation.jsonl"], ["validation.jsonl"]),
        (["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"],
         ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]),
        (["000_00000.parquet", "000_00001.parquet"], ["000_00000.parquet", "000_00001.parquet"]),
        (["notes.txt", "more.jsonl"], ["more.jsonl", "notes.txt"]),
        (["contest.jsonl", "devices.jsonl", "trainer.jsonl"], ["contest.jsonl", "devices.jsonl", "trainer.jsonl"]),
    ],
)  # fmt: skip
def test_without_several_splits_all_data_is_read(tmp_path, files, read):
    corpus = find_corpus(str(folder(tmp_path, *files)), "text")
    assert [file.name for file in corpus.files] == read
    assert bool(corpus.notes) == (len(read) < len(files))


@pytest.mark.parametrize(
    "files",
    [
        ["LICENSE", "README.md", "model.py", "test.py", "train.py"],  # a source tree
        ["a train journey.txt", "essay.txt", "the test.txt"],  # texts with titles
        ["LICENSE", "README.md", "test/a.py", "train/a.py", "train/b.txt"],
    ],
)
def test_a_folder_of_texts_is_whole(tmp_path, files):
    corpus = find_corpus(str(folder(tmp_path, *files)), "text")
    assert ([file.name for file in corpus.files], corpus.notes) == (files, ())


def test_texts_beside_a_dataset_card(tmp_path):
    folder(tmp_path, "a.txt", "b.txt", "LICENSE")
    (tmp_path / "README.md").write_text(CARD)
    assert names(tmp_path) == ["a.txt", "b.txt"]


def test_several_splits_none_of_which_is_for_training(tmp_path):
    folder(tmp_path, "data/train_sft-00000-of-00001.jsonl", *(f"data/test_sft-0000{n}-of-00002.jsonl" for n in (0, 1)))
    said = rf"none of which is called train: test_sft \('{tmp_path}/data/test_sft-0000\*'\), train_sft"
    with pytest.raises(DataError, match=said):
        names(tmp_path)
    # The names that it offers select these files.
    assert names(Path(f"{tmp_path}/data/test_sft-0000*")) == [
        "test_sft-00000-of-00002.jsonl",
        "test_sft-00001-of-00002.jsonl",
    ]


def test_an_evaluation_names_its_split(tmp_path):
    folder(tmp_path, "train.jsonl", "test.jsonl")
    with pytest.raises(DataError, match=rf"holds several splits: test \({tmp_path}/test.jsonl\), train"):
        names(tmp_path, split=None)


def table(count: int = 700):
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    return arrow.table({"id": list(range(count)), "text": sentences(count)})


def write_arrow(path: Path, rows, as_file: bool = False, batch: int = 300) -> None:
    ipc = pytest.importorskip("pyarrow.ipc")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (ipc.new_file if as_file else ipc.new_stream)(path, rows.schema) as writer:
        writer.write_table(rows, batch)


def bytes_of(result) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for prefix in result.prefixes for end in (".bin", ".idx")]


@pytest.mark.parametrize("as_file", [False, True])
def test_arrow_gives_the_bytes_of_jsonl(tmp_path, tokenizer, as_file):
    write_arrow(tmp_path / "in.arrow", table(), as_file)
    plain = write_jsonl(tmp_path / "in.jsonl", sentences(700))
    settings = Settings(tokenizer, chunk_bytes=5000)
    shown: list[int] = []
    result = preprocess([str(tmp_path / "in.arrow")], tmp_path / "a", settings, lambda it: shown.append(it.bytes_read))
    assert bytes_of(result) == bytes_of(preprocess([str(plain)], tmp_path / "b", settings, lambda _: None))
    assert len(shown) == 3
    assert shown == sorted(shown)
    assert shown[-1] == (tmp_path / "in.arrow").stat().st_size


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_two_columns_of_one_name_are_refused(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    twice = arrow.Table.from_arrays([arrow.array([text]) for text in "abc"], names=["text", "text", "other"])
    if kind == "arrow":
        write_arrow(tmp_path / "in.arrow", twice)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(twice, tmp_path / "in.parquet")
    inputs = find_inputs([str(tmp_path / f"in.{kind}")], Format.AUTO)
    with pytest.raises(DataError, match=r'the table has 2 columns "text"'):
        list(table_rows(inputs[0], ["text"], 1000))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_table_goes_on_where_it_was_stopped(tmp_path, tokenizer, kind):
    if kind == "arrow":
        write_arrow(tmp_path / "in.arrow", table())
    else:
        pytest.importorskip("pyarrow.parquet").write_table(table(), tmp_path / "in.parquet", row_group_size=300)
    source, settings = [str(tmp_path / f"in.{kind}")], Settings(tokenizer, chunk_bytes=5000, checkpoint_seconds=0)
    whole = preprocess(source, tmp_path / "whole", settings, lambda _: None)
    shown = []

    def stop(progress):
        shown.append(progress)
        if len(shown) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(source, tmp_path / "cut", settings, stop)
    resumed = preprocess(source, tmp_path / "cut", Settings(tokenizer, chunk_bytes=5000, resume=True), lambda _: None)
    assert bytes_of(resumed) == bytes_of(whole)
    assert resumed.counts.bytes_read == whole.counts.bytes_read


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "it cannot be read as arrow"),
        (b"no arrow at all", "it cannot be read as arrow"),
        (b"ARROW1", "it cannot be read as arrow"),
    ],
)
def test_a_damaged_arrow_file(tmp_path, tokenizer, content, cause):
    pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    (tmp_path / "in.arrow").write_bytes(content)
    with pytest.raises(DataError, match=rf"in\.arrow: {cause}"):
        preprocess([str(tmp_path / "in.arrow")], tmp_path / "out", Settings(tokenizer), lambda _: None)
    write_arrow(tmp_path / "in.arrow", table(10))
    with pytest.raises(DataError, match='the table has no column "body"'):
        preprocess(
            [str(tmp_path / "in.arrow")], tmp_path / "out", Settings(tokenizer, json_keys=("body",)), lambda _: None
        )


def saved_to_disk(root: Path) -> Path:
    """As `DatasetDict.save_to_disk` of the package datasets writes it, with a file that its cache left."""
    for split, count in (("train", 400), ("holdout", 30)):
        write_arrow(root / split / "data-00000-of-00001.arrow", table(count))
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split}
        (root / split / "state.json").write_text(json.dumps(state))
        (root / split / "dataset_info.json").write_text("{}")
    write_arrow(root / "train" / "cache-3fd5a2.arrow", table(400))
    (root / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "holdout"]}))
    return root


def test_a_dataset_saved_to_disk(tmp_path, tokenizer):
    root = saved_to_disk(tmp_path / "ds")
    notes: list[str] = []
    result = preprocess([str(root)], tmp_path / "out", Settings(tokenizer), lambda _: None, notes.append)
    assert result.counts.written == 400
    assert f"{root}: read split train (1 file); left out split holdout ({root}/holdout/data-00000" in notes[0]
    assert notes[1].startswith(f"{root}: left out files without data: ")
    assert "cache-3fd5a2.arrow" in notes[1] or "more" in notes[1]
    # One split by its own folder.
    one = preprocess([str(root / "holdout")], tmp_path / "one", Settings(tokenizer), lambda _: None)
    assert one.counts.written == 30


def test_a_run_trains_on_the_training_split(tmp_path, tokenizer):
    root = saved_to_disk(tmp_path / "ds")
    said: list[str] = []
    data = DataSpec(corpus=str(root), validation_every=0, cache_directory=str(tmp_path / "cache"))
    prepared = prepare(data, TokenizerSpec(path=str(tokenizer)), said.append)
    assert prepared.documents == 400
    assert said[0].startswith(f"note: {root}: read split train (1 file); left out split holdout (")
