"""Preprocessing ten times more documents takes no more memory; and gigatoken is used only where it proves exact."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from token_files import sentences, small_tokenizer, write_jsonl

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess import encoder_backend
from megalaunch.data.preprocess.encoder_backend import select_backend
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

PEAK = """
import re, resource, sys
from pathlib import Path
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import Settings
settings = Settings(Path(sys.argv[2]), workers=2, append_eod=True, chunk_bytes=1 << 16)
preprocess([sys.argv[1]], Path(sys.argv[3]), settings, lambda progress: None)
own = re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]  # ru_maxrss has the parent's in it
print(int(own) + 2 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    tokenizer = small_tokenizer(tmp_path / "tokenizer.json")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in sentences(10_000))
    peaks = []
    for times in (2, 20):
        path = tmp_path / f"{times}.jsonl"
        path.write_text(lines * times)
        command = [sys.executable, "-c", PEAK, path, tokenizer, tmp_path / f"out{times}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.1 * peaks[0], peaks


@pytest.fixture
def tokenizer_path(tmp_path) -> Path:
    return small_tokenizer(tmp_path / "tokenizer.json")


def test_an_engine_that_gives_other_ids_is_not_taken(tokenizer_path, monkeypatch):
    tokenizer = load_tokenizer(tokenizer_path)
    encode = lambda text: np.array(tokenizer.encode(text.replace("odd", "even")))  # noqa: E731
    monkeypatch.setattr(encoder_backend, "make_encoder", lambda name, content: encode)
    chosen = select_backend(EngineChoice.AUTO, tokenizer, ["the sea"])
    assert (chosen.name, chosen.note) == (EngineChoice.GIGATOKEN, "")
    chosen = select_backend(EngineChoice.AUTO, tokenizer, ["the sea", "an odd wave"])
    assert chosen.name is EngineChoice.TOKENIZERS
    assert chosen.note.endswith("gigatoken gives other ids for 'an odd wave'")
    assert chosen.note.startswith("encoding with tokenizers, which takes about 40 times the CPU time: ")
    with pytest.raises(DataError, match=r"gigatoken cannot encode this: .*Give --engine auto or tokenizers\."):
        select_backend(EngineChoice.GIGATOKEN, tokenizer, ["an odd wave"])
    assert select_backend(EngineChoice.TOKENIZERS, tokenizer, ["an odd wave"]).note == ""


def test_without_the_package_a_note_names_its_extra(tokenizer_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    tokenizer = load_tokenizer(tokenizer_path)
    chosen = select_backend(EngineChoice.AUTO, tokenizer, [])
    assert chosen.name is EngineChoice.TOKENIZERS
    assert "gigatoken is not installed (pip install 'megalaunch[data]' brings it)" in chosen.note


def test_both_engines_write_the_same_bytes(tmp_path, tokenizer_path):
    pytest.importorskip("gigatoken", reason="the extra `data` is not installed")
    from megalaunch.data.preprocess.preprocess import preprocess
    from megalaunch.data.preprocess.settings import Settings

    texts = [*sentences(200), "na\u00efve \u4e2d\u6587 \U0001f600 <|endoftext|> tail", " \n\t ", "x" * 5000]
    path, made = write_jsonl(tmp_path / "in.jsonl", texts), []
    for engine in (EngineChoice.GIGATOKEN, EngineChoice.TOKENIZERS):
        settings = Settings(tokenizer_path, append_eod=True, engine=engine)
        result = preprocess([str(path)], tmp_path / engine, settings, lambda progress: None)
        made.append([Path(f"{result.prefixes[0]}{end}").read_bytes() for end in (".bin", ".idx")])
    assert made[0] == made[1]
