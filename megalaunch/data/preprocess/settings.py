"""Settings of `preprocess`; a light module, so that the command line can import it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megalaunch.data.tokenizer.tiktoken_list import TiktokenOptions


class Format(StrEnum):
    """Format of the inputs; `auto` goes by the suffix (before that of a compression): see inputs.py."""

    AUTO = "auto"
    JSONL = "jsonl"
    PARQUET = "parquet"
    ARROW = "arrow"
    TEXT = "text"


class OnBadRecord(StrEnum):
    """Treatment of an invalid record: stop the run, skip it, or skip it and save it to the quarantine file."""

    STOP = "stop"
    SKIP = "skip"
    QUARANTINE = "quarantine"


class EngineChoice(StrEnum):
    """Encoder backend; `auto` uses gigatoken if it is installed and gives the ids of `tokenizers`."""

    AUTO = "auto"
    GIGATOKEN = "gigatoken"
    TOKENIZERS = "tokenizers"


@dataclass(frozen=True)
class MaxBad:
    """Maximum of bad records before preprocessing fails: a number, a fraction of all, or no limit (both None)."""

    count: int | None = None
    share: float | None = None

    @staticmethod
    def parse(text: str) -> MaxBad:
        """Parse `100` as a number of records, `1%` as a fraction. ValueError for anything else."""
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
class Fixes:
    """Fixes that errors and notes suggest, which name the options of `megalaunch preprocess` by default.

    Attributes:
        no_eod: to a tokenizer without an end-of-document token.
        no_special_tokens: ends the note that sequences get the tokenizer's special tokens.
        bad_record: to a record that stops the run.
        disk_full: to a failed write.
        no_workers: to worker processes that cannot be started.
        worker_died: to a worker that was killed, probably for lack of memory.
    """

    no_eod: str = "Leave out --append-eod."
    no_special_tokens: str = ", as by Megatron's tool; --no-bos leaves that out"
    bad_record: str = "To leave such records out: --on-bad-record skip."
    disk_full: str = "Free space there, then continue with --resume; no file has its final name yet."
    no_workers: str = "Give fewer --workers; the default is one per core."
    worker_died: str = "Give fewer --workers, or free memory; --resume continues with the finished work."


@dataclass(frozen=True)
class Settings:
    """Settings of a preprocessing run. A text file is one document.

    Attributes:
        tokenizer: tokenizer file or its directory.
        workers: number of encoding processes.
        append_eod: append the end-of-document token to each document.
        add_special_tokens: add the post-processor's special tokens (BOS) to every sequence, as Megatron's tool does.
        json_keys: keys or columns of the texts; each gets its own files.
        format: format of the inputs.
        on_bad_record: treatment of invalid records.
        max_bad: maximum of invalid records.
        merges: merges of a GPT-2 vocabulary file.
        tiktoken: options for Megatron's list of tiktoken ranks.
        engine: encoder backend.
        language: language for splitting sentences; None: do not split.
        resume: continue an interrupted run.
        record_bytes: larger records are invalid.
        chunk_bytes: approximate size of the chunks that are encoded at a time.
        checkpoint_seconds: interval of checkpoints for `resume`.
        sentence_lists: whether the value of a key may be a list of texts (sentences), as in Megatron's tool.
        fixes: what errors suggest to the user.
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
    sentence_lists: bool = True
    fixes: Fixes = Fixes()
