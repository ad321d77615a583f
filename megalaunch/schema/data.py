"""The `data` section: training and validation data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalaunch.schema.setting import setting

STANDARD_LIBRARY = "python-stdlib"
OWN_TEMPLATE = "tokenizer"  # of data.chat_template
HOW_TO_NAME_DATA = "data.corpus=FILE|FOLDER|GLOB for text, data.train_prefix=PREFIX for tokens"


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Training data: a corpus of text or conversations to tokenize, or prefixes of tokenized `.bin`/`.idx` files."""

    corpus: str | None = setting(
        None,
        f"File, folder or glob of text or jsonl; `{STANDARD_LIBRARY}`: the sources of this Python's standard library.",
    )
    sft_data: str | None = setting(
        None,
        "File, folder or glob of jsonl conversations to fine-tune on, one per line; only answers count in the loss.",
    )
    chat_template: Literal["chatml", "llama3", "zephyr", "plain", "tokenizer"] = setting(
        "chatml", "Template that renders a conversation as text; `tokenizer`: the tokenizer's own template."
    )
    json_key: str = setting("text", "Key of a jsonl record that holds the text.")
    validation_every: int = setting(
        20, "Use a corpus document for validation if sha256(its name) mod this is 0; 0: none.", minimum=0
    )
    on_bad_record: Literal["stop", "skip"] = setting(
        "stop", "Action on a corpus record that cannot be read: stop preparing the data, or skip and count the record."
    )
    train_prefix: str | None = setting(None, "Path of tokenized training data, without .bin/.idx.")
    validation_prefix: str | None = setting(None, "Path of tokenized validation data, without .bin/.idx.")
    blend: tuple[str, ...] = setting(
        (), "Training prefixes to blend, each `PREFIX` or `WEIGHT PREFIX`; replaces train_prefix."
    )
    validation_blend: tuple[str, ...] = setting((), "Validation prefixes to blend; replaces validation_prefix.")
    validation_sets: tuple[str, ...] = setting(
        (),
        "Further validation sets, each `NAME PREFIX`, or `NAME WEIGHT PREFIX` for every part of a blend.",
    )
    validation_tokens: int | None = setting(
        None, "Validation tokens to evaluate of each validation set; null: all.", "tokens", minimum=2, maximum=10**15
    )
    split: str | None = setting(
        None,
        "Shares of the training prefixes for training, validation and test, `969,30,1`; null: train on all of them.",
    )
    mock: bool | None = setting(
        None, "Train on synthetic tokens below model.vocab_size; null: if no other source of data is given."
    )
    reset_position_ids: bool = setting(False, "Restart position ids after each document of a sample.")
    reset_attention_mask: bool = setting(False, "Mask attention between the documents of a sample.")
    eod_mask_loss: bool = setting(False, "Exclude predictions from end-of-document tokens from the loss.")
    fim_rate: float = setting(
        0.0, "Fraction of documents transformed for fill-in-the-middle (FIM).", minimum=0, maximum=1
    )
    fim_spm_rate: float = setting(
        0.5, "Fraction of FIM documents in suffix-prefix-middle (SPM) order.", minimum=0, maximum=1
    )
    fim_tokens: tuple[str, ...] = setting(
        (), "Special tokens before prefix, middle and suffix, in this order; empty: find them by their usual names."
    )
    cache_directory: str = setting(
        "~/.cache/megalaunch", "Folder of tokenized corpora and sample indices, named by a hash of their content."
    )
    append_eod: bool = setting(True, "Append the end-of-document token to every document.")
    add_special_tokens: bool = setting(
        True,
        "Add the special tokens (BOS) of the tokenizer's post-processor to every corpus document.",
    )
    num_samples: int | None = setting(
        None,
        "Samples in the shuffled training order; null: train.steps * batch.global_batch_size.",
        minimum=1,
        maximum=10**18,
    )


def named_sources(data: DataSpec) -> tuple[str, ...]:
    """Return the keys of `data` that give a source of training data."""
    given = {
        "corpus": data.corpus is not None,
        "sft_data": data.sft_data is not None,
        "train_prefix": data.train_prefix is not None,
        "blend": bool(data.blend),
        "mock": bool(data.mock),
    }
    return tuple(key for key, is_given in given.items() if is_given)
