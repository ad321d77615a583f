"""OLMo 2: post-norms only, and QK norms over all heads together."""

from __future__ import annotations

from typing import Any

from megalaunch.importers.huggingface.family import FamilySpec, Values
from megalaunch.importers.huggingface.hf_config import ConfigFile
from megalaunch.importers.huggingface.llama import read_biases, read_common, write_common
from megalaunch.importers.huggingface.rope import read_rope, write_rope
from megalaunch.schema.model import ModelSpec


def _read(file: ConfigFile) -> Values:
    own = {"norm_placement": "post", "qk_norm": "full", "rope": read_rope(file)}
    return read_common(file, epsilon=1e-5) | read_biases(file) | own


def _write(model: ModelSpec) -> dict[str, Any]:
    shape = write_common(model)
    del shape["head_dim"]  # always hidden_size / num_attention_heads
    return shape | {"attention_bias": model.qkv_bias} | write_rope(model.rope)


FAMILY = FamilySpec("olmo2", "olmo2", "Olmo2ForCausalLM", _read, _write)
