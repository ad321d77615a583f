"""Token files held to megatron-core: it reads ours, we read its, and both write the same bytes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import sentences, small_tokenizer

from megalaunch.data.indexed_dataset.builder import TokenWriter, token_type
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.indexed_dataset.merge import merge
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

torch = pytest.importorskip("torch")
megatron = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core (the extra `parity`) is not installed"
)
CORPORA = st.lists(st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=9), max_size=3), min_size=1, max_size=12)


def megatron_writes(prefix: Path, documents: list[list[list[int]]], dtype: type) -> list[bytes]:
    """By its own builder, as its preprocess_data calls it: a document may be of several sentences."""
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = [token for sentence in document for token in sentence]
        builder.add_document(tokens, [len(sentence) for sentence in document])
    builder.finalize(f"{prefix}.idx")
    return content(prefix)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()]


@given(CORPORA, st.sampled_from([300, 65_499, 65_500, 128_000]))
@settings(max_examples=30, deadline=None)
def test_the_same_bytes_and_readable_both_ways(tmp_path_factory, documents, vocab_size):
    folder = tmp_path_factory.mktemp("files")
    dtype = megatron.DType.optimal_dtype(vocab_size)
    assert np.dtype(dtype) == token_type(vocab_size)
    theirs = megatron_writes(folder / "theirs", documents, dtype)
    with TokenWriter(folder / "ours", token_type(vocab_size)) as writer:
        for document in documents:
            for sentence in document:
                writer.add_sequence(sentence)
            writer.end_document()
    assert content(folder / "ours") == theirs
    if not any(documents):
        return  # megatron cannot map an empty .bin
    read_by_us, read_by_them = IndexedTokens(folder / "theirs"), megatron.IndexedDataset(str(folder / "ours"))
    sequences = [sentence for document in documents for sentence in document]
    assert [read_by_us.tokens(number).tolist() for number in range(len(sequences))] == sequences
    assert [read_by_them[number].tolist() for number in range(len(sequences))] == sequences
    assert read_by_them.document_indices.tolist() == read_by_us.documents.tolist()


@pytest.mark.parametrize("append_eod", [False, True])
def test_preprocess_writes_what_megatron_would(tmp_path, append_eod):
    """Its loop (encode each sentence, drop empty ones, end the document) written out over its own builder."""
    path = small_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    texts = [*sentences(40), "", ["one", "", "two"], [], ["", ""], "\u4e2d \U0001f600"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = []
    for text in texts:
        encoded = [tokenizer.encode(sentence) for sentence in ([text] if isinstance(text, str) else text)]
        document = [ids for ids in encoded if ids]
        if document and append_eod:
            document[-1].append(tokenizer.eod_id)
        documents.append(document)
    theirs = megatron_writes(tmp_path / "theirs", documents, np.uint16)
    chosen = Settings(path, workers=2, append_eod=append_eod, chunk_bytes=700)
    result = preprocess([str(tmp_path / "in.jsonl")], tmp_path / "out", chosen, lambda progress: None)
    assert content(result.prefixes[0]) == theirs


def test_merged_files_are_megatrons(tmp_path):
    parts = [[[[1, 2], [3]], []], [[[4, 5, 6]]], [[], [[7]]]]
    for number, documents in enumerate(parts):
        megatron_writes(tmp_path / f"part{number}", documents, np.uint16)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for number in range(3):
        builder.add_index(str(tmp_path / f"part{number}"))
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge([tmp_path / f"part{number}" for number in range(3)], tmp_path / "ours")
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")
