"""Write the token files of one shard, and merge those of all shards into the files of one run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError, cannot, open_output
from megalaunch.data.indexed_dataset.merge import merge
from megalaunch.data.indexed_dataset.report import read_report, report_path, write_report
from megalaunch.data.preprocess.encoder_backend import EncoderBackend
from megalaunch.data.preprocess.inputs import check_unchanged, find_inputs
from megalaunch.data.preprocess.pipeline import Job
from megalaunch.data.preprocess.preprocess import (
    Result,
    final_prefixes,
    job_fingerprint,
    quarantine_path,
    remove_quarantine,
    write_token_files,
)
from megalaunch.data.preprocess.settings import EngineChoice, Settings
from megalaunch.data.preprocess.shards.divide import divide
from megalaunch.data.preprocess.shards.parts import Parts
from megalaunch.data.preprocess.state import BAD_RECORDS_LISTED, Progress, State, work_folder
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader

_RUN_AGAIN = "Run the same command with --shards alone: it writes only such shards again, and merges."


def open_parts(inputs: Sequence[str], output_prefix: Path, settings: Settings, count: int, write: bool = True) -> Parts:
    """Return the parts of the shards, after the checks that need no tokenizer. Raises DataError."""
    found = find_inputs(inputs, settings.format)
    divide(found, count)
    return Parts.open(output_prefix, count, found, settings, write)


def write_shard(
    inputs: Sequence[str],
    output_prefix: Path,
    settings: Settings,
    shard: tuple[int, int],
    show: Callable[[Progress], None],
    note: Callable[[str], None],
    loader: TokenizerLoader,
) -> Result | None:
    """Write the part of one shard; None: it is there already. A lost worker's unfinished part is continued.

    Args:
        inputs, output_prefix, settings, show, note, loader: as for `preprocess`.
        shard: number of the shard, from 0, and the number of all.

    Raises:
        DataError: no file of the part has its final name then.
    """
    number, count = shard
    found = find_inputs(inputs, settings.format, note)
    part = divide(found, count)[number]
    parts = Parts.open(output_prefix, count, found, settings)
    if not parts.why_not(number):
        return None
    prefix = parts.prefix(number)
    unfinished = work_folder(prefix) / "state.json"
    job = Job(
        inputs=part.inputs,
        chunks=lambda start: part.chunks(settings, start),
        output_prefix=prefix,
        finals=parts.finals(number),
        hashed=part.hashed,
        start=part.start,
        size=part.size,
        lines_before=part.lines_before,
    )
    return write_token_files(job, replace(settings, resume=unfinished.exists()), loader, show, note)


def merge_shards(inputs: Sequence[str], output_prefix: Path, settings: Settings, count: int) -> Result:
    """Verify the parts of all shards, write the files of one run from them, and remove the parts.

    Raises:
        DataError: a part is missing or damaged, an input has changed, or all inputs together have no valid records.
    """
    found = find_inputs(inputs, settings.format)
    parts = Parts.open(output_prefix, count, found, settings)
    damaged = [(number, why) for number in range(count) if (why := parts.why_not(number))]
    if damaged:
        shown = "; ".join(f"shard {number}: {why.rstrip('.')}" for number, why in damaged[:3])
        cause = f"{len(damaged)} of {count} shards cannot be merged: {shown}"
        raise DataError(cause + (" ..." if len(damaged) > 3 else ""), file=parts.folder, fix=_RUN_AGAIN)
    check_unchanged(found)
    finals = final_prefixes(output_prefix, settings)
    sources = [[parts.finals(number)[key] for number in range(count)] for key in range(len(finals))]
    reports = [read_report(source) or {} for source in sources[0]]
    state = _joined_state(reports)
    state.counts.tokens = sum((read_report(one) or {})["counts"]["tokens"] for key in sources for one in key)
    state.check_complete(", ".join(inputs), settings)
    content = {**reports[0], "inputs": [entry for report in reports for entry in report["inputs"]]}
    content["fingerprint"] = job_fingerprint(found, settings)
    for final, prefixes in zip(finals, sources, strict=True):
        merge(prefixes, final, overwrite=True)
        made = read_report(final) or {}
        counts = asdict(state.counts) | {"tokens": made["counts"]["tokens"]}
        write_report(final, {**content, "bad_records": state.bad, "counts": counts, "outputs": made["outputs"]})
    quarantine = quarantine_path(output_prefix, finals) if state.counts.quarantined else None
    if quarantine is None:
        remove_quarantine(output_prefix, finals)
    else:
        _join_files([quarantine_path(parts.prefix(n), parts.finals(n)) for n in range(count)], quarantine)
    shutil.rmtree(parts.folder, ignore_errors=True)
    engine = EncoderBackend(EngineChoice(reports[0]["engine"]["name"]))
    return Result(tuple(finals), report_path(finals[0]), quarantine, state.counts, state.bad, engine)


def _joined_state(reports: Sequence[dict[str, Any]]) -> State:
    """Return the counts and bad records of all shards."""
    counts = {
        field.name: sum(report["counts"][field.name] for report in reports)
        for field in fields(Progress)
    }  # fmt: skip
    bad = [entry for report in reports for entry in report["bad_records"]]
    return State(Progress(**counts), bad=bad[:BAD_RECORDS_LISTED])


def _join_files(sources: Sequence[Path], target: Path) -> None:
    """Write the content of all files, as far as they exist, to `target`, which is complete or not there."""
    output = open_output(target)
    try:
        for source in sources:
            with contextlib.suppress(FileNotFoundError), source.open("rb") as file:
                shutil.copyfileobj(file, output.file)
        output.sync()
        output.publish()
    except OSError as error:
        raise cannot("write it", target, error, "Free space there, then run it again.") from error
    finally:
        output.discard()
