"""Which text a tokenizer is trained on, and what is said about the rest."""

import json

import pytest

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.inputs import find_inputs
from megalaunch.data.preprocess.settings import Format
from megalaunch.data.train_tokenizer import TrainingText


def test_a_record_over_the_limit_is_left_out_alone(tmp_path):
    """The limit of preprocessing: the records after it are read."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "b" * (65 << 20), "c")))
    text = TrainingText(find_inputs([str(path)], Format.AUTO), ("text",))
    assert list(text.read(1000)) == ["a", "c"]
    cause = "the record has 68 MB, the limit is 67 MB"
    assert text.left_out() == f"1 of 3 records left out, the first: {path}, line 2: {cause}"


def test_lines_are_counted_in_each_file_over_its_chunks(tmp_path):
    for name in ("a", "b"):
        lines = [json.dumps({"text": "x" * 1000})] * 5000 + [name] * (name == "b")
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    text = TrainingText(find_inputs([str(tmp_path)], Format.AUTO), ("text",))
    assert sum(map(len, text.read(1 << 30))) == text.characters == 10_000_000
    assert f"1 of 10,001 records left out, the first: {tmp_path}/b.jsonl, line 5001: " in text.left_out()


def test_text_up_to_the_wanted_size(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n{"text": "def"}\n{"text": ""}\n')
    inputs = find_inputs([str(tmp_path / "in.jsonl")], Format.AUTO)
    for size, found in ((2, ["ab"]), (3, ["abc"]), (5, ["abc", "de"]), (9, ["abc", "def", ""])):
        text = TrainingText(inputs, ("text",))
        assert list(text.read(size)) == found
        assert text.characters == len("".join(found))
        text.check("in.jsonl")


def test_empty_texts_are_valid_records_without_text(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": ""}\nx\n')
    text = TrainingText(find_inputs([str(tmp_path / "in.jsonl")], Format.AUTO), ("text",))
    assert list(text.read(9)) == [""]
    with pytest.raises(DataError, match="no text to learn from"):
        text.check("in.jsonl")
