"""Conversations: what a line may hold, what has a loss, how they are packed, and every error."""

import json
from pathlib import Path

import numpy as np
import pytest
from token_files import prepared_spec, sentences, small_tokenizer

from megalaunch.data.errors import DataError
from megalaunch.data.prepare import data_overrides, prepare
from megalaunch.data.samples.build_datasets import build_train_dataset, build_valid_dataset
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.schema import with_values


def talk(number):
    texts = sentences(40)
    return {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": texts[number % 40]},
            {"role": "assistant", "content": f"the answer {number}"},
            {"role": "user", "content": "and then"},
            {"role": "assistant", "content": f"the end {number}"},
        ]
    }


@pytest.fixture
def chat(tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json")

    def opened(lines, length=96, **data):
        path = tmp_path / "chat.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
        data = {"sft_data": str(path), "chat_template": "plain", "cache_directory": str(tmp_path / "cache")} | data
        spec = prepared_spec(length, tokenizer=tmp_path / "tokenizer.json", **data)
        return with_values(spec, data_overrides(prepare(spec.data, spec.tokenizer, lambda line: None)))

    return opened


def answers(row, tokenizer):
    """The text that has a loss, piece by piece."""
    pieces, piece = [], []
    for label, counted in zip(row.tokens[1:], row.loss_mask, strict=True):
        if counted:
            piece.append(int(label))
        elif piece:
            pieces, piece = [*pieces, piece], []
    return [tokenizer.decode(part) for part in [*pieces, piece] if part]


def test_only_answers_count_in_the_loss_and_each_once_an_epoch(chat):
    spec = chat([talk(number) for number in range(50)], length=256, validation_every=0)
    rows, tokenizer = build_train_dataset(spec), load_tokenizer(spec.tokenizer.path)
    epoch = [answers(rows[index], tokenizer) for index in range(len(rows))]
    expected = sorted(f"the {kind} {number}" for number in range(50) for kind in ("answer", "end"))
    assert sorted(text for found in epoch for text in found) == expected
    second = [answers(rows[index], tokenizer) for index in range(len(rows), 2 * len(rows) - 2)]
    assert second != epoch[: len(second)]
    again = build_train_dataset(spec)
    assert answers(again[len(rows) + 1], tokenizer) == second[1]
    assert rows.describe(0).startswith("row 0: conversations ")


def test_packed_conversations_do_not_attend_to_each_other(chat):
    rows = build_train_dataset(chat([talk(number) for number in range(50)], length=400, validation_every=0))
    row = rows[0]
    begins = np.flatnonzero(np.diff(row.document_ids)) + 1
    assert len(begins) > 2
    assert (row.positions[begins] == 0).all()
    assert not row.loss_mask[begins - 1].any()  # the first token of a conversation is told from nothing
    # The answers end with the token that ends a turn, and a model learns to write it.
    ends = [i for i in range(len(row.loss_mask) - 1) if row.loss_mask[i] and not row.loss_mask[i + 1]]
    assert {int(row.tokens[1:][i]) for i in ends} == {0}


def test_validation_holds_every_conversation_once(chat):
    spec = chat([talk(number) for number in range(200)], length=256, validation_every=5)
    tokenizer, found = load_tokenizer(spec.tokenizer.path), []
    for side in (build_train_dataset(spec), build_valid_dataset(spec)):
        found.append({text for index in range(len(side)) for text in answers(side[index], tokenizer)})
    assert len(found[0] | found[1]) == 400
    assert not found[0] & found[1]
    less = build_valid_dataset(with_values(spec, {"data.validation_tokens": 300}))
    assert 0 < len(less) < len(build_valid_dataset(spec))


def test_other_record_layouts_are_read(chat):
    lines = [
        {"conversations": [{"from": "human", "value": "hm"}, {"from": "gpt", "value": "one"}]},
        {"prompt": "hm", "completion": "two"},
        "",
    ]
    spec = chat(lines, validation_every=0)
    rows, tokenizer = build_train_dataset(spec), load_tokenizer(spec.tokenizer.path)
    # A token that begins before an answer, here with a space, is of the answer.
    assert sorted(text.strip() for text in answers(rows[0], tokenizer)) == ["one", "two"]


def test_long_conversations_are_truncated_and_those_without_an_answer_skipped(chat):
    lines = [talk(1), {"prompt": "word " * 200, "completion": "never reached"}]
    rows = build_train_dataset(chat(lines, length=96, validation_every=0))
    assert len(rows) == 1
    assert rows.describe(0).startswith("row 0: conversations 0 of")
    with pytest.raises(DataError, match="no conversation has an answer within its first 97 tokens"):
        build_train_dataset(chat(lines[1:], length=96, validation_every=0))


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "{",
            r"line 2: no JSON \(Expecting property name .*: column 2\)\. A jsonl file holds",
        ),
        ("[]", "line 2: no object, but list"),
        ({"text": "x"}, "line 2: no conversation: a line is"),
        ({"messages": [{"role": "user"}]}, 'line 2: a turn without text under "role" and "content"'),
        ({"messages": [{"role": "judge", "content": "x"}]}, "line 2: unknown role 'judge'"),
        ({"prompt": "a", "completion": "b<|endoftext|>c"}, "line 2: a message holds the end-of-document token"),
        ({"prompt": "a", "completion": "b\ud800c"}, r"line 2: a message holds half a character \(\\ud800\)"),
    ],
)
def test_a_record_that_is_not_a_conversation_is_refused(chat, line, cause):
    with pytest.raises(DataError, match=rf"chat\.jsonl, {cause}"):
        chat([talk(0), line])


def test_bad_records_can_be_skipped(chat):
    half = {"prompt": "a", "completion": "b\ud800c"}
    bad = ["{", {"text": "x"}, {"prompt": "a", "completion": "b<|endoftext|>c"}, half]
    whole = chat([talk(number) for number in range(9)], validation_every=0)
    left = chat([talk(0), *bad, *(talk(number) for number in range(1, 9))], validation_every=0, on_bad_record="skip")
    assert Path(f"{left.data.train_prefix}.bin").read_bytes() == Path(f"{whole.data.train_prefix}.bin").read_bytes()


def test_the_end_token_of_the_configuration_is_kept(chat, tmp_path):
    """Conversations end with it, so generation must stop at it."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "~"}))
    spec = chat([talk(number) for number in range(9)], validation_every=0)
    tokenizer, row = load_tokenizer(spec.tokenizer.path), build_train_dataset(spec)[0]
    assert tokenizer.token(tokenizer.eod_id) == "~"
    assert tokenizer.eod_id in row.tokens[1:][row.loss_mask]


def test_errors_of_the_settings(chat):
    with pytest.raises(DataError, match=r"<\|im_start\|> is no token of it, and data\.chat_template=chatml needs it"):
        chat([talk(0)], chat_template="chatml")
    with pytest.raises(DataError, match="it holds no conversation to train on"):
        chat([""])
    first, second = chat([talk(0)]), chat([talk(0)], chat_template="zephyr")
    assert first.data.train_prefix != second.data.train_prefix
    spec = prepared_spec(sft_data="x.jsonl")
    with pytest.raises(DataError, match=r"no such corpus|need a tokenizer"):
        prepare(spec.data, spec.tokenizer, lambda line: None)
