"""A tokenizer that another process loads gives what one that is loaded here gives, and tells of its death."""

import subprocess
import sys

import pytest
from token_files import small_tokenizer

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.encoder_backend import BackendTrial
from megalaunch.data.preprocess.settings import EngineChoice
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader, reference_ids
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

# Each case in a process of one thread, where the tokenizer is loaded by a fork; it prints what it found.
THERE = """
import os, signal, sys
from pathlib import Path
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader
from megalaunch.data.errors import DataError
with TokenizerLoader.start(Path(sys.argv[1])) as loading:
    forked = loading._process is not None
    if sys.argv[2] == "killed":
        os.kill(loading._process._process.pid, signal.SIGKILL)
    try:
        found = loading.start_check(["the sea", "a gull"])
        print([forked, found(), loading.info(), loading.vocabulary_hash()])
    except DataError as error:
        print(forked, error)
"""


def there(path, case=""):
    command = [sys.executable, "-c", THERE, str(path), case]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def test_another_process_finds_the_same(tmp_path):
    path = small_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    here = TokenizerLoader.start(path)
    here.close()  # whether or not this process could be forked
    checked, known = here.start_check(["the sea", "a gull"])(), here.info()
    assert checked == reference_ids(tokenizer, ["the sea", "a gull"])
    assert ("the sea", tokenizer.encode("the sea")) in checked
    assert (known.content, known.vocab_size, known.eod_id) == (path.read_text(), 300, tokenizer.eod_id)
    assert there(path) == str([True, checked, known, tokenizer.vocabulary_hash()])


def test_what_is_wrong_with_the_file_is_told_here(tmp_path):
    assert there(tmp_path / "none.json").startswith(f"True {tmp_path / 'none.json'}: no such file.")


def test_a_killed_process_is_named(tmp_path):
    path = small_tokenizer(tmp_path / "tokenizer.json")
    assert there(path, "killed").startswith("True the process that loads the tokenizer died, perhaps for lack")


@pytest.fixture
def loading(tmp_path):
    with TokenizerLoader.start(small_tokenizer(tmp_path / "tokenizer.json")) as made:
        yield made


def test_a_trial_takes_gigatoken_only_with_the_content_that_is_known_in_the_end(loading, tmp_path, monkeypatch):
    tried = []

    def make_encoder(name, content):
        tried.append(content)
        return load_tokenizer(tmp_path / "tokenizer.json").encode

    monkeypatch.setattr("megalaunch.data.preprocess.encoder_backend.make_encoder", make_encoder)
    trial = BackendTrial(EngineChoice.AUTO, loading, ["the sea"])
    content = (tmp_path / "tokenizer.json").read_text()
    assert trial.gigatoken(content).content == content
    assert tried == [content]  # once, whether or not it was loaded elsewhere
    assert trial.gigatoken("another").content == "another"
    assert tried == [content, "another"]


def test_a_trial_is_not_made_of_an_engine_that_is_not_asked_for(loading, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    trial = BackendTrial(EngineChoice.TOKENIZERS, loading, [])
    assert trial.gigatoken("x") is None
    assert trial.backend().name is EngineChoice.TOKENIZERS
    asked = BackendTrial(EngineChoice.GIGATOKEN, loading, [])
    assert asked.gigatoken((tmp_path / "tokenizer.json").read_text()) is None
    with pytest.raises(DataError, match="gigatoken cannot encode this: gigatoken is not installed"):
        asked.backend()
