"""`--split-sentences` writes what Megatron's loop over NLTK's sentences writes, with tables learnt from English."""

import json
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from token_files import small_tokenizer
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

CUT = 1_000_000  # characters that Megatron gives to NLTK at once


@pytest.fixture
def punkt():
    return pytest.importorskip("nltk.tokenize.punkt", reason="nltk (the extra `parity`) is not installed")


@pytest.fixture
def megatron():
    reason = "megatron-core (the extra `parity`) is not installed"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


def write_tables(folder: Path, learnt: Any) -> None:
    """Punkt's parameters of a language in the files of NLTK's `punkt_tab`."""
    learnt.abbrev_types |= {"e.g", "i.e"}
    folder.mkdir(parents=True)
    for name, lines in {
        "abbrev_types.txt": sorted(learnt.abbrev_types),
        "sent_starters.txt": sorted(learnt.sent_starters),
        "collocations.tab": ["\t".join(pair) for pair in sorted(learnt.collocations)],
        "ortho_context.tab": [f"{word}\t{bits}" for word, bits in sorted(learnt.ortho_context.items())],
    }.items():
        (folder / name).write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.slow
def test_the_bytes_are_megatrons(punkt, megatron, tmp_path, monkeypatch):
    pages = [text for _, text in islice(sorted(topics.items()), 30)]
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "tables"))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "tables")])
    learnt = punkt.PunktTrainer("\n".join(pages)).get_params()
    write_tables(tmp_path / "tables" / "tokenizers" / "punkt_tab" / "english", learnt)
    path = small_tokenizer(tmp_path / "tokenizer.json")
    tokenizer, split = load_tokenizer(path), punkt.PunktTokenizer("english").tokenize
    long = ("\n".join(topics.values()) * 4)[: CUT + 5_000]
    texts = [*pages, "", "One e.g. this. Two!", "  ", long]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    sentences = 0
    for text in texts:
        cut = [text[start : start + CUT] for start in range(0, len(text), CUT)]
        document = [ids for piece in cut for sentence in split(piece) if (ids := tokenizer.encode(sentence))]
        if document:
            document[-1].append(tokenizer.eod_id)
        sentences += len(document)
        builder.add_document([token for ids in document for token in ids], [len(ids) for ids in document])
    builder.finalize(str(tmp_path / "theirs.idx"))

    arguments = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "ours", "--split-sentences"]
    arguments += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", path, "--workers", 2]
    done = CliRunner().invoke(app, ["preprocess", *map(str, arguments), "--append-eod"])
    assert done.exit_code == 0, done.output
    assert sentences > 20 * len(texts)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours_text_sentence.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
