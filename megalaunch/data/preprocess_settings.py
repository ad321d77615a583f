"""What `preprocess` can be told; light, so that the command line can import it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Format(StrEnum):
    """How inputs are read: `auto` takes `.jsonl` and `.ndjson` as jsonl, and all else as text."""

    AUTO = "auto"
    JSONL = "jsonl"
    TEXT = "text"


class OnBadRecord(StrEnum):
    """What a record that cannot be read does: end everything, or be left out and counted."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True)
class Settings:
    """What decides the bytes that are written, and (`workers`) how fast; a text file is one document."""

    tokenizer: Path
    workers: int = 1
    append_eod: bool = False
    json_key: str = "text"
    format: Format = Format.AUTO
    on_bad_record: OnBadRecord = OnBadRecord.STOP
