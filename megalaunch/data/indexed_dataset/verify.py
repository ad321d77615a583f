"""Full verification of a prefix of token files: index invariants, token ids, and the hashes in its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.block_hashes import BLOCK, Altered, find_altered
from megalaunch.data.indexed_dataset.dataset import REMAKE, IndexedTokens, bin_path, idx_path
from megalaunch.data.indexed_dataset.report import read_report
from megalaunch.data.prepared_files import TOKENIZER, TRAIN, VALIDATION
from megalaunch.data.tokenizer.tokenizer import load_tokenizer

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class VerificationResult:
    """Counts of a verified prefix.

    Attributes:
        documents: number of documents.
        sequences: number of sequences.
        tokens: number of tokens.
        largest: largest token id; None without tokens.
        vocab_size: vocabulary that the ids were checked against; None if it is not known.
        hashed: whether a report had hashes to compare with.
    """

    documents: int
    sequences: int
    tokens: int
    largest: int | None
    vocab_size: int | None
    hashed: bool


def verify(prefix: Path, vocab_size: int | None, show: Callable[[int, int], None]) -> VerificationResult:
    """Check a prefix completely.

    Args:
        prefix: path without .bin and .idx.
        vocab_size: ids must be below it; None: that of the report, or of the tokenizer in a prepared corpus.
        show: called with bytes done and bytes in total.

    Raises:
        DataError: the first error found: altered bytes, the index, or an id outside the vocabulary (with its place).
    """
    report = read_report(prefix)
    hashed = report is not None and _check_hashes(prefix, report)
    tokens = IndexedTokens(prefix)
    if vocab_size is None:
        vocab_size = _vocab_size(prefix, report)
    largest: int | None = None
    total = tokens.num_tokens
    for start in range(0, total, _TOKENS_AT_ONCE):
        part = tokens.stream[start : start + _TOKENS_AT_ONCE]
        largest = max(largest or 0, int(part.max()))
        wrong = part < 0 if vocab_size is None else (part >= vocab_size) | (part < 0)
        if wrong.any():
            raise _out_of_vocab(tokens, start + int(wrong.argmax()), vocab_size)
        show(min(start + _TOKENS_AT_ONCE, total) * tokens.dtype.itemsize, total * tokens.dtype.itemsize)
    return VerificationResult(tokens.num_documents, tokens.num_sequences, total, largest, vocab_size, hashed)


def _vocab_size(prefix: Path, report: dict[str, Any] | None) -> int | None:
    """Return the vocabulary size from the report or the tokenizer in the same directory, if any. Raises DataError."""
    if report is not None:
        size = report["tokenizer"].get("vocab_size")
        return size if isinstance(size, int) else None
    beside = prefix.with_name(TOKENIZER)
    if prefix.name in (TRAIN, VALIDATION) and beside.is_file():
        return load_tokenizer(beside).vocab_size
    return None


def _out_of_vocab(tokens: IndexedTokens, position: int, vocab_size: int | None) -> DataError:
    size = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size:,}"
    cause = f"id {tokens.stream[position]:,} of {_place(tokens, position)} is outside {size}"
    fix = "Give the tokenizer that encoded the files, or run `megalaunch preprocess` again."
    return DataError(cause, file=bin_path(tokens.prefix), fix=fix)


def _place(tokens: IndexedTokens, position: int) -> str:
    """Return a token's document and its offset in the document, as text."""
    sequence = int(np.searchsorted(tokens.offsets, position * tokens.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(tokens.documents, sequence, side="right")) - 1
    offset = position - tokens.first_token(int(tokens.documents[document]))
    return f"document {document:,}, token {offset:,}"


def _check_hashes(prefix: Path, report: dict[str, Any]) -> bool:
    """Return whether the report has hashes of the files; DataError if they differ."""
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
        return f"it has {path.stat().st_size:,} bytes; {size:,} were written"
    inside = ""
    if path == bin_path(prefix):  # the index is checked before the tokens
        tokens = IndexedTokens(prefix)
        first, last = (_place(tokens, byte // tokens.dtype.itemsize) for byte in (altered.first, altered.last))
        inside = f" ({first})" if altered.first == altered.last else f" ({first}, to {last})"
    if altered.was is None:
        return f"bytes {altered.first:,} to {altered.last:,}{inside} differ from the written ones (sha256)"
    with path.open("rb") as file:
        file.seek(altered.first)
        stands = file.read(1)[0]
    return f"byte {altered.first:,}{inside} is 0x{stands:02x}; 0x{altered.was:02x} was written"
