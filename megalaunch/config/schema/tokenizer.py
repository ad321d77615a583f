"""The `tokenizer` section."""

from __future__ import annotations

from dataclasses import dataclass

from megalaunch.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer.json, or the size of the byte-level BPE to train on the corpus."""

    path: str | None = setting(None, "A tokenizer.json; null: train one on the corpus.")
    vocab_size: int = setting(4096, "Vocabulary of a tokenizer trained on the corpus.", "tokens", minimum=257)
