"""A run keeps its tokenizer when it starts, so that it outlives the cache it came from."""

import shutil

import pytest
from token_files import prepared_spec, small_tokenizer

from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.train.checkpointer import save_tokenizer
from megalaunch.rundir.paths import RunDirectory


def test_the_tokenizer_outlives_the_cache(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    spec = prepared_spec(tokenizer=small_tokenizer(cache / "tokenizer.json"))
    directory = RunDirectory(tmp_path)
    save_tokenizer(directory, spec)
    kept = directory.tokenizer.read_bytes()
    assert load_tokenizer(directory.tokenizer).encode("the old sea") == load_tokenizer(cache).encode("the old sea")
    shutil.rmtree(cache)
    save_tokenizer(directory, spec)
    assert directory.tokenizer.read_bytes() == kept
    directory.tokenizer.unlink()
    with pytest.raises(
        CheckpointError, match=r"the tokenizer cannot be saved with the run: .*tokenizer\.json: no such"
    ):
        save_tokenizer(directory, spec)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_made_up_tokens_need_none(tmp_path):
    save_tokenizer(RunDirectory(tmp_path), prepared_spec(mock=True))
    assert not list(tmp_path.iterdir())
