"""The `tokenizer` section."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer.json, or the vocabulary size of a byte-level BPE tokenizer to train on the corpus."""

    path: str | None = setting(None, "Path of a tokenizer.json; null: train one on the corpus.")
    vocab_size: int = setting(4096, "Vocabulary size of a tokenizer trained on the corpus.", "tokens", minimum=257)
