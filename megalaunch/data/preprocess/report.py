"""Writes the reports of a preprocessing run: counts, settings, hashes and left-out records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megalaunch
from megalaunch.data.indexed_dataset.builder import token_type
from megalaunch.data.indexed_dataset.dataset import bin_path, idx_path
from megalaunch.data.indexed_dataset.report import write_report
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.pipeline import TextToTokens
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.tokenizer.tokenizer import tokenizer_file

_RESULT_SETTINGS = (
    *("workers", "append_eod", "add_special_tokens", "json_keys"),
    *("format", "on_bad_record", "language", "record_bytes"),
)


def write_reports(
    prefixes: Sequence[Path],
    inputs: Sequence[Input],
    hashes: Sequence[str],
    settings: Settings,
    run: TextToTokens,
    vocabulary_hash: str,
    outputs: dict[str, Any],
) -> list[Path]:
    """Write one report for each prefix (one for each JSON key), with that prefix's token count.

    Args:
        prefixes: the prefixes of the output.
        inputs, hashes: the files that were read, and the sha256 of each.
        settings, run: how the tokens were made.
        vocabulary_hash: `Tokenizer.vocabulary_hash` of the tokenizer.
        outputs: size and hashes of each file written.

    Raises:
        DataError: a report cannot be written.
    """
    tokenizer, around, state = run.tokenizer, run.special_tokens, run.state
    path = tokenizer_file(settings.tokenizer)
    chosen = asdict(settings)
    width = token_type(tokenizer.vocab_size).itemsize
    content: dict[str, Any] = {
        "megalaunch": megalaunch.__version__,
        "settings": {
            "tokenizer": str(path),
            "merges": None if settings.merges is None else str(settings.merges),
            "tiktoken": asdict(settings.tiktoken),
            **{name: chosen[name] for name in _RESULT_SETTINGS},
        },
        "engine": {"name": run.backend.name, "note": run.backend.note},
        "tokenizer": {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "vocabulary_sha256": vocabulary_hash,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "ids_before_text": list(around.before),
            "ids_after_text": list(around.after),
        },
        "inputs": [
            {"file": str(entry.path), "bytes": entry.size, "sha256": digest}
            for entry, digest in zip(inputs, hashes, strict=True)
        ],
        "bad_records": state.bad,
    }
    reports = []
    for prefix in prefixes:
        files = {name: outputs[name] for name in (bin_path(prefix).name, idx_path(prefix).name)}
        counts = asdict(state.counts) | {"tokens": files[bin_path(prefix).name]["bytes"] // width}
        reports.append(write_report(prefix, {**content, "counts": counts, "outputs": files}))
    return reports
