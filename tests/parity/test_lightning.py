"""docs/migrate-lightning.md: a model goes from a checkpoint of Lightning to megalaunch and back, with its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface
from megalaunch.engine.inference.load_model import open_model

transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
lightning = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

TOKENS = torch.arange(24).view(2, 12)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Module(lightning.LightningModule):
    """A causal language model of transformers, as a user of Lightning wraps it."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES)
        self.model = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.slow
def test_a_checkpoint_of_lightning_comes_and_returns(tmp_path: Path) -> None:
    torch.manual_seed(1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(TOKENS, batch_size=2))
    trainer.save_checkpoint(tmp_path / "lightning.ckpt")

    module = Module.load_from_checkpoint(tmp_path / "lightning.ckpt").eval()
    module.model.save_pretrained(tmp_path / "hf")
    words = {f"w{index}": index for index in range(64)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "hf" / "tokenizer.json"))
    import_huggingface(tmp_path / "hf", tmp_path / "ours")
    decoder = open_model(tmp_path / "ours", device=torch.device("cpu")).decoder
    export_huggingface(tmp_path / "ours", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = module.model(TOKENS).logits
        torch.testing.assert_close(decoder(TOKENS), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(back(TOKENS).logits, expected)
