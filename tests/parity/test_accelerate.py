"""docs/migrate-accelerate.md: a model goes from Accelerate to megalaunch and back, with the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.inference.load_model import open_model

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate (the extra `parity`) is not installed")

TOKENS = torch.arange(24).view(2, 12) % 60
VOCABULARY = 64


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, torch.Tensor]:
    """Train a model by Accelerate; return the folders of its two ways to save, and the model's logits."""
    folder = tmp_path_factory.mktemp("accelerate")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    accelerator = accelerate.Accelerator(cpu=True)
    model = transformers.LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        accelerator.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        optimizer.step()
        optimizer.zero_grad()
    whole, weights = folder / "whole", folder / "weights"
    accelerator.unwrap_model(model).save_pretrained(whole)
    accelerator.save_model(model, weights)
    config.save_pretrained(weights)
    _add_tokenizer(whole, weights)
    with torch.no_grad():
        return whole, weights, model.eval()(TOKENS).logits


def _add_tokenizer(*folders: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    for folder in folders:
        tokenizer = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
        tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("way", ["save_pretrained", "save_model"])
def test_a_model_of_accelerate_comes_and_returns(trained, way, tmp_path):
    whole, weights, expected = trained
    import_huggingface(whole if way == "save_pretrained" else weights, tmp_path / "ours")
    decoder = open_model(tmp_path / "ours", device=torch.device("cpu")).decoder
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), expected, rtol=1e-5, atol=1e-5)
    export_huggingface(tmp_path / "ours", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, expected)
    empty = transformers.LlamaForCausalLM(back.config)
    accelerate.load_checkpoint_in_model(empty, str(tmp_path / "back"))
    for name, value in empty.state_dict().items():
        assert torch.equal(value, back.state_dict()[name]), name
