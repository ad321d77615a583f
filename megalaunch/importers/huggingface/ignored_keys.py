"""Keys of config.json that do not change the logits: metadata, and keys without effect at their value.

Tested against transformers: tests/parity/families/test_published_configs.py compares published files with and without
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys about names, initialisation, training, serving or storage, ignored at any value: nearly every file has them.
METADATA = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_model_name_or_path",  # from a GGUF file, by transformers
        "_name_or_path",
        "_num_labels",
        "architectures",
        "auto_map",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "model_type",
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "predict_special_tokens",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
_GENERATION = "a setting of text generation (generation_config.json)"
_TRAINING = "a setting of training or loading"
_CODE = "code of a model folder is never run"
# Keys ignored at any value, with the reason.
_IGNORED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "assistant_confidence_threshold",
            "assistant_lookbehind",
            "bad_words_ids",
            "begin_suppress_tokens",
            "decoder_start_token_id",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "encoder_repetition_penalty",
            "epsilon_cutoff",
            "eta_cutoff",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "max_new_tokens",
            "min_length",
            "no_repeat_ngram_size",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "target_lookbehind",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        (
            "attn_implementation",
            "_experts_implementation",
            "_experts_implementation_internal",
            "is_llama_config",
            "is_qwen2_config",
            "low_cpu_mem_usage",
            "max_sequence_length",
            "model_max_length",
            "neftune_noise_alpha",
            "tf_legacy_loss",
            "tokenizer_model_max_length",
            "tokenizer_padding_side",
            "torchscript",
            "unsloth_fixed",
            "unsloth_version",
            "use_bfloat16",
            "use_flash_attention_2",
            "use_flash_attn",
            "use_reentrant_checkpointing",
        ),
        _TRAINING,
    ),
    "activation": "transformers reads hidden_act",
    "boi_token_index": "a token of images",
    "eoi_token_index": "a token of images",
    "image_token_index": "a token of images",
    **dict.fromkeys(("_attn_implementation_internal", "custom_pipelines", "trust_remote_code"), _CODE),
    "mask_token_id": "the id of a special token",
    "n_special": "the number of special tokens of the first GPT",
    "num_labels": "a setting of classifiers",
    "sliding_window_size": "transformers reads sliding_window",
}
# Keys ignored at these values only, with the reason.
_IGNORED_AT_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "_sliding_window_pattern": ((6,), "the family's default"),
    "add_cross_attention": ((False,), "the model has no encoder"),
    "attention_bias": ((False,), "no projection has a bias"),
    "attention_probs_dropout_prob": ((0, 0.0), "no dropout"),
    "embd_pdrop": ((0, 0.0), "no dropout"),
    "full_attn_mod": ((1,), "every layer has full attention"),
    "hidden_dropout": ((0, 0.0), "no dropout"),
    "hidden_dropout_prob": ((0, 0.0), "no dropout"),
    "is_encoder_decoder": ((False,), "the model has no encoder"),
    "interpolate_factor": ((1,), "no interpolation"),
    "lm_head_bias": ((False,), "the head has no bias"),
    "mlp_bias": ((False,), "no projection has a bias"),
    "multi_query": ((False,), "the family's default"),
    "no_bias": ((True,), "no projection has a bias"),
    "per_layer_config": (({}, []), "all layers are identical"),
    "pruned_heads": (({}, []), "no head is pruned"),
    "qk_layer_norms": ((False,), "no QK norm"),
    "qkv_bias": ((False,), "no projection has a bias"),
    "resid_pdrop": ((0, 0.0), "no dropout"),
    "rope_interleaved": ((False,), "the halves of a head are not interleaved"),
    "tie_encoder_decoder": ((False,), "the model has no encoder"),
    "use_bidirectional_attention": ((False,), "attention is causal"),
    "use_mrope": ((False,), "positions have one dimension"),
    "use_qk_norm": ((False,), "no QK norm"),
    "use_sliding_window": ((False,), "all layers have full attention"),
}


def ignore_reason(key: str, value: Any) -> str | None:
    """Return why a key has no effect at this value; None if it may change the model."""
    if key in _IGNORED:
        return _IGNORED[key]
    values, why = _IGNORED_AT_VALUES.get(key, ((), ""))
    return why if any(type(value) is type(one) and value == one for one in values) else None
