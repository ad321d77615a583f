"""The full check of a prefix of token files: every invariant, every token, every byte that a report vouches for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.block_hashes import BLOCK, Altered, find_altered
from megalaunch.data.indexed_dataset.dataset import REMAKE, IndexedTokens, bin_path, idx_path
from megalaunch.data.preprocess.build_corpus import TOKENIZER, TRAIN, VALIDATION
from megalaunch.data.preprocess.report import read_report
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class VerificationResult:
    """What was found good; `vocab_size` None: none is known, so that ids could not be held against it.

    `hashed` says whether a report held hashes to compare with.
    """

    documents: int
    sequences: int
    tokens: int
    largest: int
    vocab_size: int | None
    hashed: bool


def verify(prefix: Path, vocab_size: int | None, show: Callable[[int, int], None]) -> VerificationResult:
    """Check a prefix wholly; `show` gets bytes done and bytes in all.

    `vocab_size` None: that of the report beside it, or of the tokenizer in a folder of a prepared corpus. Raises
    DataError for the first thing that is wrong: altered bytes, the index, an id beyond the vocabulary (with its place).
    """
    report = read_report(prefix)
    hashed = report is not None and _check_hashes(prefix, report)
    tokens = IndexedTokens(prefix)
    if vocab_size is None:
        vocab_size = _vocab_size(prefix, report)
    largest, total = -1, tokens.num_tokens
    for start in range(0, total, _TOKENS_AT_ONCE):
        part = tokens.stream[start : start + _TOKENS_AT_ONCE]
        largest = max(largest, int(part.max()))
        wrong = part < 0 if vocab_size is None else (part >= vocab_size) | (part < 0)
        if wrong.any():
            raise _out_of_vocab(tokens, start + int(wrong.argmax()), vocab_size)
        show(min(start + _TOKENS_AT_ONCE, total) * tokens.dtype.itemsize, total * tokens.dtype.itemsize)
    return VerificationResult(tokens.num_documents, tokens.num_sequences, total, largest, vocab_size, hashed)


def _vocab_size(prefix: Path, report: dict[str, Any] | None) -> int | None:
    """The size of the vocabulary that the ids are of, where something beside the files says so. Raises DataError."""
    if report is not None:
        size = report["tokenizer"].get("vocab_size")
        return size if isinstance(size, int) else None
    beside = prefix.with_name(TOKENIZER)
    if prefix.name in (TRAIN, VALIDATION) and beside.is_file():
        return load_tokenizer(beside).vocab_size
    return None


def _out_of_vocab(tokens: IndexedTokens, position: int, vocab_size: int | None) -> DataError:
    size = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size:,}"
    cause = f"id {tokens.stream[position]:,} of {_place(tokens, position)}, is beyond {size}"
    fix = "Give the tokenizer that made the files, or make them anew with `megalaunch preprocess`."
    return DataError(cause, file=bin_path(tokens.prefix), fix=fix)


def _place(tokens: IndexedTokens, position: int) -> str:
    """The document of a token, and its offset in that."""
    sequence = int(np.searchsorted(tokens.offsets, position * tokens.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(tokens.documents, sequence, side="right")) - 1
    offset = position - tokens.first_token(int(tokens.documents[document]))
    return f"document {document:,}, token {offset:,}"


def _check_hashes(prefix: Path, report: dict[str, Any]) -> bool:
    """Whether the report vouches for the bytes; DataError when they are not those that it describes."""
    known = report.get("outputs") or {}
    found = False
    for path in (idx_path(prefix), bin_path(prefix)):
        made = known.get(path.name)
        if not isinstance(made, dict) or made.get("block_bytes") != BLOCK or not path.is_file():
            continue
        found = True
        try:
            altered = find_altered(path, made)
        except OSError as error:
            raise cannot("read it", path, error) from error
        if altered is not None:
            raise DataError(_altered(prefix, path, altered, made["bytes"]), file=path, fix=REMAKE)
    return found


def _altered(prefix: Path, path: Path, altered: Altered, size: int) -> str:
    if path.stat().st_size != size:
        return f"it has {path.stat().st_size:,} bytes, and {size:,} were written"
    inside = ""
    if path == bin_path(prefix):  # the index was found good before
        tokens = IndexedTokens(prefix)
        first, last = (_place(tokens, byte // tokens.dtype.itemsize) for byte in (altered.first, altered.last))
        inside = f" ({first})" if altered.first == altered.last else f" ({first}, to {last})"
    if altered.was is None:
        return f"bytes {altered.first:,} to {altered.last:,}{inside} are not those that were written (sha256 differs)"
    with path.open("rb") as file:
        file.seek(altered.first)
        stands = file.read(1)[0]
    return f"byte {altered.first:,}{inside} is 0x{stands:02x}, and 0x{altered.was:02x} was written"
