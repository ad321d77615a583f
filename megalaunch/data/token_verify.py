"""The full check of a prefix of token files: every invariant, every token, every byte that a report vouches for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalaunch.data.block_hashes import BLOCK, hash_file
from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed import REMAKE, IndexedTokens, bin_path, idx_path
from megalaunch.data.preprocess_report import read_report

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Verified:
    """What was found good; `hashed` says whether a report held hashes to compare with."""

    documents: int
    sequences: int
    tokens: int
    largest: int
    hashed: bool


def verify(prefix: Path, vocab_size: int | None, show: Callable[[int, int], None]) -> Verified:
    """Check a prefix wholly; `show` gets bytes done and bytes in all.

    `vocab_size` None: that of the report beside it, if there is one. Raises DataError for the first thing
    that is wrong: in the index, an id beyond the vocabulary (with its document and offset), altered bytes.
    """
    tokens = IndexedTokens(prefix)
    report = read_report(prefix)
    if vocab_size is None and report is not None:
        vocab_size = report["tokenizer"].get("vocab_size")
    hashed = report is not None and _check_hashes(prefix, report)
    largest, total = -1, tokens.num_tokens
    for start in range(0, total, _TOKENS_AT_ONCE):
        part = tokens.stream[start : start + _TOKENS_AT_ONCE]
        largest = max(largest, int(part.max()))
        wrong = part < 0 if vocab_size is None else (part >= vocab_size) | (part < 0)
        if wrong.any():
            raise _beyond(tokens, start + int(wrong.argmax()), vocab_size)
        show(min(start + _TOKENS_AT_ONCE, total) * tokens.dtype.itemsize, total * tokens.dtype.itemsize)
    return Verified(tokens.num_documents, tokens.num_sequences, total, largest, hashed)


def _beyond(tokens: IndexedTokens, position: int, vocab_size: int | None) -> DataError:
    sequence = int(np.searchsorted(tokens.offsets, position * tokens.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(tokens.documents, sequence, side="right")) - 1
    offset = position - tokens.first_token(int(tokens.documents[document]))
    size = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size:,}"
    cause = f"id {tokens.stream[position]:,} of document {document:,}, token {offset:,}, is beyond {size}"
    fix = "Give the tokenizer that made the files, or make them anew with `megalaunch preprocess`."
    return DataError(cause, file=bin_path(tokens.prefix), fix=fix)


def _check_hashes(prefix: Path, report: dict[str, Any]) -> bool:
    known = report.get("outputs") or {}
    found = False
    for path in (idx_path(prefix), bin_path(prefix)):
        made = known.get(path.name)
        if not isinstance(made, dict) or made.get("block_bytes") != BLOCK:
            continue
        found = True
        try:
            digests = hash_file(path).digests()
        except OSError as error:
            raise cannot("read it", path, error) from error
        for number, (ours, theirs) in enumerate(zip(digests, made["sha256"], strict=False)):
            if ours != theirs:
                first, last = number * BLOCK, min((number + 1) * BLOCK, path.stat().st_size) - 1
                cause = f"bytes {first:,} to {last:,} are not those that were written (their sha256 differs)"
                raise DataError(cause, file=path, fix=REMAKE)
    return found
