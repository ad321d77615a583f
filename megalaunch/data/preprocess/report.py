"""The report next to preprocessed files: counts, settings, hashes and left-out records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megalaunch
from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.atomic_file import AtomicFile
from megalaunch.data.indexed_dataset.builder import token_type
from megalaunch.data.indexed_dataset.dataset import REMAKE, bin_path, idx_path
from megalaunch.data.preprocess.encoder_backend import EncoderBackend
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.state import State
from megalaunch.data.preprocess.tokenizer_process import TokenizerInfo
from megalaunch.data.tokenizer.tokenizer import SpecialTokens, Tokenizer, tokenizer_file

_RESULT_SETTINGS = (
    *("workers", "append_eod", "add_special_tokens", "json_keys"),
    *("format", "on_bad_record", "language", "record_bytes"),
)


def report_path(prefix: Path) -> Path:
    """Return the path of a prefix's report."""
    return prefix.with_name(prefix.name + ".json")


def read_report(prefix: Path) -> dict[str, Any] | None:
    """Return the report of a prefix; None if there is none or it cannot be read."""
    try:
        report = json.loads(report_path(prefix).read_bytes())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and isinstance(report.get("tokenizer"), dict) else None


def check_report(prefix: Path, tokenizer: Tokenizer) -> str | None:
    """Check a prefix against its report and return one line on how it was made; None without a report.

    Raises:
        DataError: the files were made with another vocabulary than that of `tokenizer`, or their sizes have changed.
    """
    report = read_report(prefix)
    if report is None:
        return None
    made, counts = report["tokenizer"], report.get("counts") or {}
    if made.get("vocabulary_sha256") not in (None, tokenizer.vocabulary_hash()):
        cause = f"its tokens were made with another tokenizer ({report.get('settings', {}).get('tokenizer')})"
        raise DataError(cause, file=prefix, fix="Set tokenizer.path to that one, or preprocess the text again.")
    _check_sizes(prefix, report.get("outputs"))
    left_out = counts.get("skipped", 0) + counts.get("quarantined", 0)
    return (
        f"{prefix.name}: {counts.get('written', 0):,} documents, {counts.get('tokens', 0):,} tokens"
        + (f", {left_out:,} records left out" if left_out else "")
        + f" (preprocessed from {len(report.get('inputs') or [])} files)"
    )


def _check_sizes(prefix: Path, outputs: object) -> None:
    for path in (bin_path(prefix), idx_path(prefix)):
        made = outputs.get(path.name) if isinstance(outputs, dict) else None
        written = made.get("bytes") if isinstance(made, dict) else None
        if isinstance(written, int) and path.stat().st_size != written:
            cause = f"it has {path.stat().st_size:,} bytes, its report says {written:,}: another file took its place"
            raise DataError(cause, file=path, fix=f"{REMAKE} Or remove {report_path(prefix).name}.")


def write_reports(
    prefixes: Sequence[Path],
    inputs: Sequence[Input],
    hashes: Sequence[str],
    settings: Settings,
    tokenizer: TokenizerInfo,
    vocabulary_hash: str,
    around: SpecialTokens,
    engine: EncoderBackend,
    state: State,
    outputs: dict[str, Any],
) -> list[Path]:
    """Write one report for each prefix (one for each JSON key), with that prefix's token count.

    Args:
        prefixes: the prefixes of the output.
        inputs, hashes: the files that were read, and the sha256 of each.
        settings, tokenizer, vocabulary_hash, engine: how the tokens were made.
        around: special tokens added to every sequence.
        state: counts and bad records.
        outputs: size and hashes of each file written.

    Raises:
        DataError: a report cannot be written.
    """
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
        "engine": {"name": engine.name, "note": engine.note},
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
        made = {name: outputs[name] for name in (bin_path(prefix).name, idx_path(prefix).name)}
        counts = asdict(state.counts) | {"tokens": made[bin_path(prefix).name]["bytes"] // width}
        reports.append(write_report(prefix, {**content, "counts": counts, "outputs": made}))
    return reports


def merge_reports(prefixes: Sequence[Path]) -> dict[str, Any] | None:
    """Return the merged report of several prefixes without counts and outputs; None unless each has a report.

    Raises:
        DataError: they were made with different vocabularies.
    """
    reports = [read_report(prefix) for prefix in prefixes]
    known = [(prefix, report) for prefix, report in zip(prefixes, reports, strict=True) if report is not None]
    for prefix, report in known[1:]:
        if report["tokenizer"].get("vocabulary_sha256") != known[0][1]["tokenizer"].get("vocabulary_sha256"):
            cause = f"it was made with another tokenizer than {known[0][0]}, so its ids mean other text"
            raise DataError(cause, file=prefix, fix="Preprocess the texts of both with one tokenizer.")
    if not known or len(known) < len(prefixes):
        return None
    first = known[0][1]
    inputs: list[Any] = []
    for _, report in known:
        inputs += [entry for entry in report.get("inputs") or [] if entry not in inputs]
    return {
        "megalaunch": megalaunch.__version__,
        "made_of": [str(prefix) for prefix in prefixes],
        "settings": first.get("settings") or {},
        "tokenizer": first["tokenizer"],
        "inputs": inputs,
    }


def write_report(prefix: Path, content: dict[str, Any]) -> Path:
    """Write a report atomically; DataError if that fails."""
    report = report_path(prefix)
    unfinished = AtomicFile(report)
    try:
        unfinished.file.write((json.dumps(content, indent=2) + "\n").encode())
        unfinished.sync()
        unfinished.publish()
    except OSError as error:
        raise cannot("write it", report, error, "Free space there, then go on with --resume.") from error
    finally:
        unfinished.discard()
    return report
