"""The `data` section: which text a model learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.config.schema.setting import setting

STANDARD_LIBRARY = "python-stdlib"
OWN_TEMPLATE = "tokenizer"  # of data.chat_template


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A corpus of text or conversations that is prepared once, or prefixes of `.bin/.idx` files made earlier."""

    corpus: str | None = setting(
        None, f"File, folder or glob of text or jsonl; `{STANDARD_LIBRARY}`: Python's own sources found here."
    )
    sft_data: str | None = setting(
        None, "File, folder or glob of jsonl conversations to tune on, one a line; only answers have a loss."
    )
    chat_template: Literal["chatml", "llama3", "zephyr", "plain", "tokenizer"] = setting(
        "chatml", "How a conversation is written as text; `tokenizer`: by the template that came with the tokenizer."
    )
    json_key: str = setting("text", "Key of the text in a jsonl record.")
    validation_every: int = setting(
        20, "A corpus document is kept for validation when sha256(its name) mod this is 0; 0: none.", minimum=0
    )
    on_bad_record: Literal["stop", "skip"] = setting(
        "stop", "What a corpus record that cannot be read does: end the preparation, or be left out and counted."
    )
    train_prefix: str | None = setting(None, "Path of prepared training tokens, without .bin/.idx.")
    validation_prefix: str | None = setting(None, "Path of prepared validation tokens, without .bin/.idx.")
    blend: tuple[str, ...] = setting(
        (), "Prepared training prefixes to mix, each `PREFIX` or `WEIGHT PREFIX`; in place of train_prefix."
    )
    validation_blend: tuple[str, ...] = setting((), "The same for validation.")
    validation_tokens: int | None = setting(
        None, "Tokens of the validation text that are validated on; null: all.", "tokens", minimum=2, maximum=10**15
    )
    split: str | None = setting(
        None,
        "Parts of the training prefixes for training, validation and test, `969,30,1`; null: all of a blend trains.",
    )
    mock: bool = setting(False, "Made-up tokens of a model.vocab_size, for measuring; needs no data.")
    reset_position_ids: bool = setting(False, "Positions start again after each document of a sample.")
    reset_attention_mask: bool = setting(False, "Attention does not cross from document to document.")
    eod_mask_loss: bool = setting(False, "Predicting from an end-of-document token has no loss.")
    fim_rate: float = setting(0.0, "Part of the documents turned to fill-in-the-middle.", minimum=0, maximum=1)
    fim_spm_rate: float = setting(0.5, "Part of those in suffix-prefix-middle order.", minimum=0, maximum=1)
    fim_tokens: tuple[str, ...] = setting(
        (), "Tokens before prefix, middle and suffix, in this order; empty: found by their usual names."
    )
    cache_directory: str = setting(
        "~/.cache/megalaunch", "Where prepared corpora and sample orders are kept, by content."
    )
    append_eod: bool = setting(True, "End every document with the end-of-document token.")
    add_special_tokens: bool = setting(
        True,
        "Give every corpus document the special tokens (BOS) that the tokenizer's post-processor puts around a text.",
    )
    num_samples: int | None = setting(
        None,
        "Training samples the order is drawn for; null: train.steps * batch.global_batch_size.",
        minimum=1,
        maximum=10**18,
    )
