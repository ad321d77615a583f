"""A Megatron user's preprocessing command works as it is."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
from token_files import sentences, small_tokenizer, with_special_tokens, write_jsonl

from megalaunch.cli.data.megatron_args import translate_args
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.tokenizer.tokenizer import load_tokenizer


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = "from megalaunch.cli.main import main; main()"
    command = [sys.executable, "-c", program, "preprocess", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_of_megatrons_guide(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    write_jsonl(tmp_path / "data.jsonl", sentences(40))
    arguments = f"--input {tmp_path}/data.jsonl --output-prefix {tmp_path}/processed_data --tokenizer-type "
    arguments += f"HuggingFaceTokenizer --tokenizer-model {tokenizer} --workers 2 --append-eod"
    done = run(*arguments.split())
    assert done.returncode == 0, done.stderr
    read = IndexedTokens(tmp_path / "processed_data_text_document")
    assert read.num_documents == 40
    assert read.tokens(0)[-1] == 0


def test_gpt2_files_lists_and_partitions(tmp_path):
    model = json.loads(small_tokenizer(tmp_path / "tokenizer.json", 400).read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    for name in "ab":
        records = "".join(json.dumps({"text": text, "more": text[:9]}) + "\n" for text in sentences(20))
        (tmp_path / f"{name}.json").write_text(records)
    done = run(
        *("--input", tmp_path / "a.json", tmp_path / "b.json", "--json-keys", "text", "more"),
        *("--output-prefix", tmp_path / "out", "--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt", "--workers", "1"),
        *("--partitions", "2", "--keep-sequential-samples", "--log-interval", "10"),
    )
    assert done.returncode == 0, done.stderr
    assert "note: --partitions is not needed" in done.stderr
    assert "40 documents" in done.stderr  # the progress line that --log-interval asks for
    for key in ("text", "more"):
        assert IndexedTokens(tmp_path / f"out_{key}_document").num_documents == 40


def test_unknown_tokenizer_types_are_named(tmp_path):
    done = run("--input", "x", "--output-prefix", tmp_path / "o", "--tokenizer-type", "BertWordPieceCase")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "--tokenizer-type BertWordPieceCase is not supported; the supported types are HuggingFaceTok"
    )


@pytest.mark.parametrize("argument", ["--find-optimal-num-workers", "--workers-to-check=16 32", "--max-documents=9"])
def test_the_search_for_workers_is_answered_with_the_other_way(argument, tmp_path):
    done = run("--input", "x", "--output-prefix", tmp_path / "o", "--workers", "2", *argument.replace("=", " ").split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"{argument.partition('=')[0]} is not supported: omit it and --workers; preprocess then"
    )
    assert done.stderr.count("\n") == 1
    with pytest.raises(ValueError, match=r"omit it and --workers"):
        translate_args([argument])


def test_newlines_between_sentences(tmp_path):
    """Megatron looks at --keep-newlines only when it splits sentences."""
    rewritten = translate_args(["--input", "a", "--keep-newlines", "--append-eod"])
    assert rewritten.arguments == ["--append-eod", "a"]
    assert len(rewritten.notes) == 1
    assert rewritten.notes[0].startswith("--keep-newlines has no effect")
    done = run("--input", "x", "--output-prefix", tmp_path / "o", "--keep-newlines", "--split-sentences")
    assert done.returncode == 2
    assert done.stderr.startswith("--keep-newlines is not supported with --split-sentences, which drops")
    assert "a list of strings under the key is a document of these sentences" in done.stderr


def test_what_the_newline_error_advises_keeps_newlines(tmp_path):
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": ["The sea.\n\n", "The shore.\n"]}) + "\n")
    done = run(tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", 1)
    assert done.returncode == 0, done.stderr
    read = IndexedTokens(tmp_path / "out_text_document")
    assert (read.num_documents, len(read.lengths)) == (1, 2)
    texts = [load_tokenizer(tokenizer).decode(read.tokens(number).tolist()) for number in range(2)]
    assert texts == ["The sea.\n\n", "The shore.\n"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--input a b --workers 2", "--workers 2 a b"),
        ("--input=a --tokenizer-model=t", "--tokenizer t a"),
        ("a b --output-prefix p --tokenizer t", "a b --output-prefix p --tokenizer t"),
        ("--json-keys x y --input -", "--json-key x --json-key y -"),
        ("--lang german --split-sentences --tokenizer-type Llama2Tokenizer", "--language german --split-sentences"),
        ("--partitions 1 --append-eod", "--append-eod"),
    ],
)
def test_arguments_are_translated(arguments, expected):
    rewritten = translate_args(arguments.split())
    assert rewritten.arguments == expected.split()
    assert rewritten.notes == []


@pytest.mark.slow
def test_split_sentences_with_nltks_tables(tmp_path):
    """A sequence a sentence; without the package, its name."""
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    path = Path(write_jsonl(tmp_path / "in.jsonl", ["The sea. The shore."]))
    done = run(path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--split-sentences", "--workers", 1)
    try:
        import nltk  # noqa: F401
    except ImportError:
        assert done.returncode == 3
        assert done.stderr == "splitting sentences needs the package nltk. pip install nltk brings it.\n"
    else:
        assert done.returncode == 0 or "NLTK has no Punkt tables for english" in done.stderr


def test_bos_is_left_out_where_it_is_said(tmp_path):
    tokenizer = with_special_tokens(small_tokenizer(tmp_path / "tokenizer.json"), "<s>")
    path = write_jsonl(tmp_path / "in.jsonl", ["the sea"])
    first = [path, "--output-prefix", tmp_path / "out", "--tokenizer", tokenizer, "--workers", 1, "--overwrite"]
    for arguments, ids in (([], [300]), (["--no-bos"], []), (["--tokenizer-hf-no-include-special-tokens"], [])):
        done = run(*first, *arguments)
        assert done.returncode == 0, done.stderr
        expected = [*ids, *load_tokenizer(tokenizer).encode("the sea")]
        assert IndexedTokens(tmp_path / "out_text_document").tokens(0).tolist() == expected
        assert ("(ids [300]), as by Megatron's tool; --no-bos leaves that out" in done.stderr) is bool(ids)


@pytest.mark.parametrize(
    ("flag", "note"),
    [
        ("--use-gigatoken", "is not needed: gigatoken is used wherever its ids"),
        ("--tokenizer-hf-no-use-fast", "has no effect: the ids are those of tokenizer.json"),
        ("--tokenizer-sentencepiece-legacy", "has no effect: without added special tokens"),
        ("--tokenizer-type HuggingFaceTokenizer --vocab-size 9", "has no effect: the size is read from the tokenizer"),
    ],
)
def test_flags_of_tokenizers_without_effect_are_noted(flag, note):
    rewritten = translate_args(["--input", "a", *flag.split(), "--append-eod"])
    assert rewritten.arguments == ["--append-eod", "a"]
    assert len(rewritten.notes) == 1
    assert note in rewritten.notes[0]


def test_flags_of_tiktoken_are_ours():
    arguments = "--tokenizer-type TikTokenizer --tiktoken-pattern v1 --vocab-size=300 --tiktoken-num-special-tokens 50"
    assert translate_args(arguments.split()).arguments == arguments.replace("=", " ").split()[2:]


def test_code_of_a_tokenizer_is_refused_with_the_reason(tmp_path):
    done = run("--input", "x", "--output-prefix", tmp_path / "o", "--trust-remote-code")
    assert done.returncode == 2
    assert done.stderr.startswith("--trust-remote-code is refused: megalaunch runs no code of a tokenizer.")
    with pytest.raises(ValueError, match="--special-tokens is not supported: add them to the tokenizer"):
        translate_args(["--special-tokens", "<a>", "<b>"])


def test_a_list_of_tiktoken_ranks_by_megatrons_options(tmp_path):
    tokens = [bytes([value]) for value in range(256)]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    (tmp_path / "ranks.json").write_text(json.dumps(entries))
    write_jsonl(tmp_path / "in.jsonl", ["Ab<s>"])
    arguments = (
        f"--input {tmp_path}/in.jsonl --output-prefix {tmp_path}/o --tokenizer-type TikTokenizer --tokenizer-model "
    )
    arguments += (
        f"{tmp_path}/ranks.json --tiktoken-pattern v2 --vocab-size 306 --tiktoken-num-special-tokens 50 --workers 1"
    )
    done = run(*arguments.split(), "--append-eod")
    assert done.returncode == 0, done.stderr
    assert IndexedTokens(tmp_path / "o_text_document").tokens(0).tolist() == [50 + 65, 50 + 98, 1, 2]
