"""A model with experts is opened for generation: from a folder and from the checkpoint that it is converted to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_variants import VOCABULARY, make
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from megalaunch.engine.checkpoint.convert import import_huggingface
from megalaunch.engine.inference.load_model import not_verified_warning, open_model

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")


@pytest.mark.parametrize("name", ["mixtral", "gpt oss", "deepseek v3"])
def test_weights_and_expert_biases_arrive(name, tmp_path):
    theirs = make(name, tmp_path / "hf")
    tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    import_huggingface(tmp_path / "hf", tmp_path / "ckpt")
    tokens = torch.arange(20).unsqueeze(0)
    for source in ("hf", "ckpt"):
        decoder = open_model(tmp_path / source, device=torch.device("cpu")).decoder
        assert all(buffer.dtype == torch.float32 for buffer in decoder.buffers())
        with torch.no_grad():
            torch.testing.assert_close(decoder(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_the_command_in_the_note_quotes_a_path_with_a_space():
    assert "(megalaunch convert import 'my models/hf' --output " in not_verified_warning(Path("my models/hf"))
