"""docs/migrate-deepspeed.md: a ZeRO checkpoint, made safetensors by DeepSpeed's tool, gives its logits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megalaunch.engine.checkpoint.convert import import_huggingface
from megalaunch.engine.inference.load_model import open_model

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")
if importlib.util.find_spec("deepspeed") is None:
    reason = "deepspeed is not installed (DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed)"
    pytest.skip(reason, allow_module_level=True)

# In a process of its own: DeepSpeed reads its device from the environment, and compiles its collectives once a machine.
TRAIN = """
import os, sys
import deepspeed, torch
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

folder = sys.argv[1]
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
config = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
tokens = torch.arange(24).view(2, 12)
for _ in range(2):
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
engine.save_checkpoint(folder + "/zero")
convert_zero_checkpoint_to_fp32_state_dict(folder + "/zero", folder + "/hf", safe_serialization=True)
model.config.save_pretrained(folder + "/hf")
with torch.no_grad():
    save_file({"tokens": tokens, "logits": engine(input_ids=tokens).logits}, folder + "/expected.safetensors")
"""


@pytest.mark.slow
def test_a_zero_checkpoint_comes(tmp_path: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {**os.environ, **place, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    words = {f"w{index}": index for index in range(64)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(tmp_path / "hf" / "tokenizer.json"))
    import_huggingface(tmp_path / "hf", tmp_path / "ours")
    expected = load_file(tmp_path / "expected.safetensors")
    decoder = open_model(tmp_path / "ours", device=torch.device("cpu")).decoder
    with torch.no_grad():
        torch.testing.assert_close(decoder(expected["tokens"]), expected["logits"], rtol=1e-5, atol=1e-6)
