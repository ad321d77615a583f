"""The report next to token files (`PREFIX.json`): how they were made, their counts and their hashes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, cannot
from megalaunch.data.indexed_dataset.dataset import REMAKE, bin_path, idx_path
from megalaunch.data.tokenizer.tokenizer import Tokenizer
from megalaunch.fs import PUBLIC_FILE_MODE, write_file_atomically
from megalaunch.version import __version__


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
        cause = f"its tokens are from another tokenizer ({report.get('settings', {}).get('tokenizer')})"
        raise DataError(cause, file=prefix, fix="Set tokenizer.path to that one, or preprocess the text again.")
    _check_sizes(prefix, report.get("outputs"))
    documents, files = counts.get("written", 0), len(report.get("inputs") or [])
    left_out = counts.get("skipped", 0) + counts.get("quarantined", 0)
    return (
        f"{prefix.name}: {documents:,} document{'' if documents == 1 else 's'}, {counts.get('tokens', 0):,} tokens"
        + (f", {left_out:,} records left out" if left_out else "")
        + f" (preprocessed from {files} file{'' if files == 1 else 's'})"
    )


def _check_sizes(prefix: Path, outputs: object) -> None:
    for path in (bin_path(prefix), idx_path(prefix)):
        made = outputs.get(path.name) if isinstance(outputs, dict) else None
        written = made.get("bytes") if isinstance(made, dict) else None
        if isinstance(written, int) and path.stat().st_size != written:
            cause = f"it has {path.stat().st_size:,} bytes, its report says {written:,}: the file was replaced"
            raise DataError(cause, file=path, fix=f"{REMAKE} Or remove {report_path(prefix).name}.")


def merge_reports(prefixes: Sequence[Path]) -> dict[str, Any] | None:
    """Return the merged report of several prefixes without counts and outputs; None unless each has a report.

    Raises:
        DataError: they were made with different vocabularies.
    """
    reports = [read_report(prefix) for prefix in prefixes]
    known = [(prefix, report) for prefix, report in zip(prefixes, reports, strict=True) if report is not None]
    for prefix, report in known[1:]:
        if report["tokenizer"].get("vocabulary_sha256") != known[0][1]["tokenizer"].get("vocabulary_sha256"):
            cause = f"it is from another tokenizer than {known[0][0]}, so the same id is different text"
            raise DataError(cause, file=prefix, fix="Preprocess the texts of both with one tokenizer.")
    if not known or len(known) < len(prefixes):
        return None
    first = known[0][1]
    inputs: list[Any] = []
    for _, report in known:
        inputs += [entry for entry in report.get("inputs") or [] if entry not in inputs]
    return {
        "megalaunch": __version__,
        "made_of": [str(prefix) for prefix in prefixes],
        "settings": first.get("settings") or {},
        "tokenizer": first["tokenizer"],
        "inputs": inputs,
    }


def write_report(prefix: Path, content: dict[str, Any]) -> Path:
    """Write a report atomically; DataError if that fails."""
    path = report_path(prefix)
    try:
        write_file_atomically(path, json.dumps(content, indent=2) + "\n", PUBLIC_FILE_MODE, leftover="lock")
    except OSError as error:
        raise cannot("write it", path, error, "Free space there, then continue with --resume.") from error
    return path
