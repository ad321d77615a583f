"""Look at the files that a preprocessing run would replace: those of the same run, or others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import bin_path, idx_path
from megalaunch.data.indexed_dataset.report import read_report
from megalaunch.data.preprocess.inputs import find_inputs
from megalaunch.data.preprocess.preprocess import final_prefixes, job_fingerprint
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.state import work_folder


def is_complete(inputs: Sequence[str], output_prefix: Path, settings: Settings, overwrite: bool) -> bool:
    """Return whether all files of a run are there: the same run would write the same bytes.

    A run that goes on with unfinished work may replace what it was to replace at its start.

    Args:
        inputs, output_prefix, settings: as for `preprocess`.
        overwrite: files of another run may be replaced.

    Raises:
        DataError: there are files of another run.
    """
    finals, is_unfinished = final_prefixes(output_prefix, settings), work_folder(output_prefix).exists()
    if is_unfinished and settings.resume:
        return False
    existing = [path for final in finals for path in (bin_path(final), idx_path(final)) if path.exists()]
    if not existing:
        return False
    difference = "an unfinished run was to replace it" if is_unfinished else _difference(inputs, finals, settings)
    if difference and not overwrite:
        fix = "Give another --output-prefix, or --overwrite to replace it."
        raise DataError(f"it exists, and {difference}", file=existing[0], fix=fix)
    return not difference


def _difference(inputs: Sequence[str], finals: Sequence[Path], settings: Settings) -> str:
    """Return how what is there differs from what would be written; "" if it does not."""
    reports = [read_report(final) for final in finals]
    known = [report for report in reports if report is not None and isinstance(report.get("fingerprint"), dict)]
    if len(known) < len(finals):
        return "no report says of what it was made"
    if not all(_has_size(path, report) for final, report in zip(finals, known, strict=True) for path in _files(final)):
        return "not all files have the sizes that the report says"
    found = find_inputs(inputs, settings.format)
    if any(entry.is_stdin for entry in found):
        return "standard input may be another text"
    wanted = job_fingerprint(found, settings)
    changed = [name for name, value in wanted.items() if any(r["fingerprint"].get(name) != value for r in known)]
    if changed:
        return f"was made of other {' and '.join(changed)}"
    counts, before = known[0].get("counts") or {}, (known[0].get("settings") or {}).get("on_bad_record")
    if before != settings.on_bad_record and counts.get("skipped", 0) + counts.get("quarantined", 0):
        return f"was made with --on-bad-record {before}"
    return ""


def _files(final: Path) -> tuple[Path, Path]:
    return bin_path(final), idx_path(final)


def _has_size(path: Path, report: dict[str, Any]) -> bool:
    described = (report.get("outputs") or {}).get(path.name) or {}
    return path.exists() and path.stat().st_size == described.get("bytes")
