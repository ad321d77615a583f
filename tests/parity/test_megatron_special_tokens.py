"""BOS and its kind in token files: held to the tokenizer class that Megatron's preprocess_data encodes with."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from slow_cases import slow_but
from token_files import sentences, small_tokenizer, with_special_tokens

from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.prepare import prepare
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import Settings
from megalaunch.schema.data import DataSpec
from megalaunch.schema.tokenizer import TokenizerSpec

torch = pytest.importorskip("torch")
indexed_dataset = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core (the extra `parity`) is not installed"
)
huggingface = pytest.importorskip("megatron.core.tokenizers.text.libraries.huggingface_tokenizer")

TEXTS = [*sentences(20), "", ["one", "", "two"], [], ["", ""], "<s> in a text \u4e2d </s>"]


def folder_of_a_tokenizer(folder: Path, before: str, after: str, config: dict) -> Path:
    """As Hugging Face's hub has them."""
    folder.mkdir()
    with_special_tokens(small_tokenizer(folder / "tokenizer.json"), before, after)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def megatron_writes(prefix: Path, folder: Path, texts: list, append_eod: bool, include: bool) -> list[bytes]:
    """The loop of tools/preprocess_data.py (Encoder.encode, Partition.process_json_file) over its own classes."""
    theirs = huggingface.HuggingFaceTokenizer(str(folder), use_fast=True, include_special_tokens=include)
    builder = indexed_dataset.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=indexed_dataset.DType.optimal_dtype(theirs.vocab_size)
    )
    for text in texts:
        ids, lengths = [], []
        for sentence in text if isinstance(text, list) else [text]:
            if sentence_ids := theirs.text_to_ids(sentence):
                ids.extend(sentence_ids)
                lengths.append(len(sentence_ids))
        if ids and append_eod:
            ids.append(theirs.eod)
            lengths[-1] += 1
        builder.add_document(ids, lengths)
    builder.finalize(f"{prefix}.idx")
    return content(prefix)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()]


SPECIAL = [
    ("<s>", "", {"bos_token": "<s>"}),
    # transformers 5 goes by tokenizer.json alone, whatever stands beside it.
    ("<s>", "", {"bos_token": "<s>", "add_bos_token": False}),
    ("", "", {"bos_token": "<|endoftext|>", "add_bos_token": True}),
    ("<s>", "</s>", {"bos_token": "<s>"}),
    ("", "</s>", {}),
]


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "config"),
    slow_but(SPECIAL, *SPECIAL[::3]),
)
def test_special_tokens_are_megatrons(tmp_path, before, after, config, add_special_tokens):
    folder = folder_of_a_tokenizer(tmp_path / "tokenizer", before, after, config)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = Settings(folder, add_special_tokens=add_special_tokens, chunk_bytes=500)
    for append_eod in (False, True):
        theirs = megatron_writes(tmp_path / f"theirs{append_eod}", folder, TEXTS, append_eod, add_special_tokens)
        for workers in (1, 2):
            chosen = replace(settings, append_eod=append_eod, workers=workers)
            result = preprocess([str(source)], tmp_path / f"ours{append_eod}{workers}", chosen, lambda progress: None)
            assert content(result.prefixes[0]) == theirs


def test_a_corpus_gets_what_preprocess_gives(tmp_path):
    folder = folder_of_a_tokenizer(tmp_path / "tokenizer", "<s>", "", {"bos_token": "<s>"})
    source = tmp_path / "in.jsonl"
    texts = [text for text in TEXTS if isinstance(text, str)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    theirs = megatron_writes(tmp_path / "theirs", folder, texts, True, True)
    data = DataSpec(corpus=str(source), validation_every=0, cache_directory=str(tmp_path / "cache"))
    tokenizer = TokenizerSpec(path=str(folder))
    reported: list[str] = []
    made = prepare(data, tokenizer, reported.append)
    assert content(made.train_prefix) == theirs
    told = [line for line in reported if "special tokens before it (ids [300])" in line]
    assert len(told) == 1
    assert "data.add_special_tokens=false leaves that out" in told[0]
    without = prepare(replace(data, add_special_tokens=False), tokenizer, reported.append)
    assert content(without.train_prefix) == megatron_writes(tmp_path / "without", folder, texts, True, False)


def test_the_report_and_a_note_say_so(tmp_path):
    folder = folder_of_a_tokenizer(tmp_path / "tokenizer", "<s>", "</s>", {})
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": "the sea"}) + "\n")
    notes: list[str] = []
    result = preprocess([str(source)], tmp_path / "out", Settings(folder), lambda progress: None, notes.append)
    assert any("before it (ids [300]) and special tokens after it (ids [301])" in note for note in notes)
    report = json.loads(result.report.read_bytes())
    assert report["settings"]["add_special_tokens"] is True
    assert (report["tokenizer"]["ids_before_text"], report["tokenizer"]["ids_after_text"]) == ([300], [301])
    notes.clear()
    bare = Settings(folder, add_special_tokens=False)
    result = preprocess([str(source)], tmp_path / "bare", bare, lambda progress: None, notes.append)
    assert notes == []
    report = json.loads(result.report.read_bytes())
    assert (report["settings"]["add_special_tokens"], report["tokenizer"]["ids_before_text"]) == (False, [])
    assert np.isin(IndexedTokens(result.prefixes[0]).tokens(0), [300, 301]).sum() == 0
