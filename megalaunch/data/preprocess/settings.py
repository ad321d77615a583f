"""What `preprocess` can be told; light, so that the command line can import it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """How inputs are read: `auto` goes by the suffix (below that of a compression): see inputs.py."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    TEXT = "text"


class OnBadRecord(StrEnum):
    """What a record that cannot be read does: end everything, be left out, or be left out and kept aside."""

    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


class EngineChoice(StrEnum):
    """What encodes: `auto` takes gigatoken where it is installed and gives the ids of `tokenizers`."""

    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"


@dataclass(frozen=True)
class MaxBad:
    """How many bad records may be left out before preprocessing fails: a number, a share of all, or any (both None)."""

    count: int | None = None
    share: float | None = None

    @staticmethod
    def parse(text: str) -> MaxBad:
        """`100` is a number of records, `1%` a share. ValueError for anything else."""
        if text.endswith("%"):
            percent = float(text[:-1])
            if not 0 <= percent <= 100:
                raise ValueError(text)
            return MaxBad(share=percent / 100)
        if int(text) < 0:
            raise ValueError(text)
        return MaxBad(count=int(text))

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share * 100:g}%"
        return "any number" if self.count is None else f"{self.count:,}"


@dataclass(frozen=True)
class TiktokenOptions:
    """What Megatron's JSON list of tiktoken ranks does not say itself; the defaults are Megatron's."""

    pattern: str = "v2"
    vocab_size: int = 1 << 17
    special_tokens: int = 1000


@dataclass(frozen=True)
class Settings:
    """What decides the bytes that are written, and how they are made; a text file is one document.

    `add_special_tokens`: every sequence gets what the tokenizer's post-processor puts around a text (BOS), as
    Megatron's tool does. `merges` goes with a GPT-2 vocabulary file. `language` is that of the sentences to split,
    None: do not split. A record over `record_bytes` is a bad one. About `chunk_bytes` are encoded at a time, and at
    least every `checkpoint_seconds` the work is made safe for `resume`.
    """

    tokenizer: Path
    workers: int = 1
    append_eod: bool = False
    add_special_tokens: bool = True
    json_keys: tuple[str, ...] = ("text",)
    format: Format = Format.AUTO
    on_bad_record: OnBadRecord = OnBadRecord.STOP
    max_bad: MaxBad = MaxBad()
    merges: Path | None = None
    tiktoken: TiktokenOptions = TiktokenOptions()
    engine: EngineChoice = EngineChoice.AUTO
    language: str | None = None
    resume: bool = False
    record_bytes: int = 64 << 20
    chunk_bytes: int = 2 << 20
    checkpoint_seconds: float = 10.0
