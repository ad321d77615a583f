"""Tasks for lm-eval with local files, and a small random Llama with a tokenizer that puts a token before a text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import yaml

_WORDS = [
    *("the", "a", "red", "old", "small", "house", "river", "stone", "tree", "bird"),
    *("sings", "falls", "stands", "under", "over", "beside", "and", "never"),
]


def write_model(folder: Path, begins: bool) -> None:
    """A Llama of transformers with its tokenizer; `begins`: whether that puts its first token before each text."""
    import tokenizers
    import transformers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(_WORDS)] * 9, trainer)
    if begins:
        inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    named = {"bos_token": "<s>", "eos_token": "</s>"} if begins else {"eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=inner.get_vocab_size(),
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def write_tasks(folder: Path, longest: int = 60) -> list[str]:
    """A multiple choice, a task of written text and one of whole texts, in YAML with their jsonl; returns the names.

    Texts have 3 to `longest` words; those of 60 are more than the model takes.
    """
    folder.mkdir()
    draw = random.Random(4)
    with (folder / "rows.jsonl").open("w") as rows:
        for _ in range(12):
            words = [draw.choice(_WORDS) for _ in range(draw.randint(3, longest))]
            choices = [" ".join(draw.choices(_WORDS, k=draw.randint(1, 4))) for _ in range(3)]
            row = {"text": " ".join(words), "choices": choices, "answer": draw.randrange(3), "said": "e"}
            rows.write(json.dumps(row) + "\n")
    kinds = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "local_writing": {
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{said}}",
            "generation_kwargs": {"until": ["s", "\n", "old"], "max_gen_toks": 14},
            "filter_list": [
                {
                    "name": "vowel",
                    "filter": [{"function": "regex", "regex_pattern": "([aeiou])"}, {"function": "take_first"}],
                }
            ],
            "metric_list": [{"metric": "exact_match"}],
        },
        "local_reading": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, kind in kinds.items():
        data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **kind}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return list(kinds)
