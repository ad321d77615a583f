"""A small random model of transformers for each family, and for each variant that is awkward in some way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 53  # odd, so that padding would show
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


def llama3() -> dict[str, Any]:
    return rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)


GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
GEMMA = {**_LLAMA, "head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 10}

_MOE = {**_LLAMA, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_QWEN = {"num_experts": 5, "moe_intermediate_size": 20}

_DEEPSEEK = {
    **_MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=0.7)

# name: the class of the configuration, and what it is made with
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt2 wide": (
        "GPT2Config",
        {**GPT2, "n_inner": 40, "activation_function": "gelu", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    ),
    "llama 1": ("LlamaConfig", {**_LLAMA, "num_key_value_heads": 4}),
    "llama 3.2": ("LlamaConfig", {**_LLAMA, **llama3(), "tie_word_embeddings": True}),
    "llama biases": ("LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama linear": ("LlamaConfig", {**_LLAMA, **rope("linear", factor=4.0), "hidden_act": "gelu"}),
    "llama yarn": (
        "LlamaConfig",
        {**_LLAMA, **rope("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    "llama yarn in full": (
        "LlamaConfig",
        {
            **_LLAMA,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                beta_fast=8.0,
                beta_slow=2.0,
                attention_factor=1.3,
            ),
        },
    ),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 6, "head_dim": 8}),
    "mistral full": ("MistralConfig", {**_LLAMA, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2 windows": (
        "Qwen2Config",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 12}),
    "smollm3": ("SmolLM3Config", {**_LLAMA, "no_rope_layer_interval": 2}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 7}),
    "gemma3 full": ("Gemma3TextConfig", {**GEMMA, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}),
    "gemma3 scaled": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {**_LLAMA, "sliding_window": 9, **rope("default", partial_rotary_factor=0.5)}),
    "phi3 long": (
        "Phi3Config",
        {
            **{key: value for key, value in _LLAMA.items() if key != "pad_token_id"},
            "pad_token_id": None,
            "original_max_position_embeddings": 32,
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.5],
                long_factor=[1.0, 4.0],
                original_max_position_embeddings=32,
            ),
        },
    ),
    "olmo2": ("Olmo2Config", dict(_LLAMA)),
    "mixtral": ("MixtralConfig", {**_MOE, "num_local_experts": 5, "sliding_window": 7}),
    "qwen2 moe": ("Qwen2MoeConfig", {**_MOE, **_QWEN, "shared_expert_intermediate_size": 36, "head_dim": 8}),
    "qwen3 moe": ("Qwen3MoeConfig", {**_MOE, **_QWEN, "head_dim": 12, "norm_topk_prob": True}),
    "qwen3 moe sparse": ("Qwen3MoeConfig", {**_MOE, **_QWEN, "head_dim": 8, "decoder_sparse_step": 2}),
    "olmoe": ("OlmoeConfig", {**_MOE, "num_experts": 6, "num_experts_per_tok": 3}),
    "deepseek v2": (
        "DeepseekV2Config",
        {**_DEEPSEEK, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek v2 lite": ("DeepseekV2Config", {**_DEEPSEEK, **_YARN, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek v3": (
        "DeepseekV3Config",
        {**_DEEPSEEK, **_YARN, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
    ),
    "moonlight": (
        "DeepseekV3Config",
        {**_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    ),
    "gpt oss": (
        "GptOssConfig",
        {
            **_MOE,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
            "head_dim": 12,
            "num_local_experts": 4,
            "sliding_window": 7,
            "swiglu_limit": 0.5,
        },
    ),
    "pythia": ("GPTNeoXConfig", {**NEOX, **rope("default", partial_rotary_factor=0.25)}),
    "pythia in turn": (
        "GPTNeoXConfig",
        {**NEOX, "use_parallel_residual": False, **rope("default", partial_rotary_factor=0.5)},
    ),
}


def make(name: str, folder: Path, **changes: Any) -> Any:
    """The model, with biases and norms moved from zeros and ones, saved to the folder."""
    import transformers

    kind, values = VARIANTS[name]
    torch.manual_seed(sum(name.encode()))
    config = getattr(transformers, kind)(**{**values, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith(".e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.eval().save_pretrained(folder)
    return model


# A model of text and images, with the keys that its makers leave out left out.
MULTIMODAL: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 6],
    "boi_token_index": 50,
    "eoi_token_index": 51,
    "image_token_index": 52,
    "initializer_range": 0.3,
    "mm_tokens_per_image": 4,
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 7,
        "initializer_range": 0.3,
        "sliding_window": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "image_size": 28,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def make_multimodal(folder: Path, **changes: Any) -> Any:
    """The model, saved to the folder with the few keys of config.json; `changes` are those of its text_config."""
    import transformers

    config = {**MULTIMODAL, "text_config": {**MULTIMODAL["text_config"], **changes}}
    torch.manual_seed(7)
    read = transformers.Gemma3Config.from_dict(config)
    model = transformers.Gemma3ForConditionalGeneration._from_config(read, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    model.eval().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return model


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """What transformers makes of a folder, and what it missed or did not expect."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, local_files_only=True
    )
