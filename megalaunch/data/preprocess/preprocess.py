"""`megalaunch preprocess`: text to token files in Megatron's format and their reports; needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.builder import token_type
from megalaunch.data.indexed_dataset.dataset import bin_path, idx_path
from megalaunch.data.indexed_dataset.report import write_report
from megalaunch.data.preprocess.chunking import chunks
from megalaunch.data.preprocess.encoder_backend import EncoderBackend
from megalaunch.data.preprocess.inputs import Input, find_inputs
from megalaunch.data.preprocess.pipeline import Job, TextToTokens
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.state import Progress, resume_fingerprint, tokenizer_fingerprint
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader
from megalaunch.data.tokenizer.tokenizer import tokenizer_file
from megalaunch.version import __version__

_RESULT_SETTINGS = (
    *("workers", "append_eod", "add_special_tokens", "json_keys"),
    *("format", "on_bad_record", "language", "record_bytes"),
)


@dataclass(frozen=True)
class Result:
    """Result of a preprocessing run.

    Attributes:
        prefixes: prefix of each key's files.
        report: path of the (first) report.
        quarantine: file of the quarantined records; None if there are none.
        counts: final counts.
        bad_records: the first bad records, as (file, line, cause).
        engine: the encoder backend.
    """

    prefixes: tuple[Path, ...]
    report: Path
    quarantine: Path | None
    counts: Progress
    bad_records: list[dict[str, Any]]
    engine: EncoderBackend


def preprocess(
    inputs: Sequence[str],
    output_prefix: Path,
    settings: Settings,
    show: Callable[[Progress], None],
    note: Callable[[str], None] = lambda text: None,
    loader: TokenizerLoader | None = None,
) -> Result:
    """Write `<output_prefix>_<key>_document.bin/.idx` for each key, and `.json` with counts and hashes.

    Documents are written in input order for any number of workers.

    Args:
        inputs: files, directories, globs or `-`.
        output_prefix, settings: start of the output's names, and settings of the run.
        show: called with the counts after each chunk.
        note: called with each note to the user.
        loader: is already loading the tokenizer of these settings; closed here.

    Raises:
        DataError: no file has its final name then, and finished work is saved for `settings.resume` (state.py).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise DataError("preprocessing was started by torchrun, once a process", fix="Start it by itself, once.")
    with loader or TokenizerLoader.start(settings.tokenizer, settings.merges, settings.tiktoken) as loading:
        found = find_inputs(inputs, settings.format, note)
        finals = final_prefixes(output_prefix, settings)
        job = Job(found, lambda start: chunks(found, settings, start), output_prefix, finals, hashed=found)
        return write_token_files(job, settings, loading, show, note, ", ".join(inputs))


def final_prefixes(output_prefix: Path, settings: Settings) -> list[Path]:
    """Return the prefixes of the token files, one a key."""
    level = "document" if settings.language is None else "sentence"
    return [output_prefix.with_name(f"{output_prefix.name}_{key}_{level}") for key in settings.json_keys]


def job_fingerprint(inputs: Sequence[Input], settings: Settings) -> dict[str, str]:
    """Hash all that decides the bytes of the token files, by name: what `is_complete` compares with the report's."""
    return resume_fingerprint(inputs, settings, tokenizer_fingerprint(settings))


def quarantine_path(output_prefix: Path, finals: Sequence[Path]) -> Path:
    """Return the file of the quarantined records."""
    return finals[0].with_name(f"{output_prefix.name}_quarantine.jsonl")


def remove_quarantine(output_prefix: Path, finals: Sequence[Path]) -> None:
    """Remove the quarantined records of an earlier run, whose token files were replaced by ones that have none."""
    quarantine_path(output_prefix, finals).unlink(missing_ok=True)


def write_token_files(
    job: Job,
    settings: Settings,
    loading: TokenizerLoader,
    show: Callable[[Progress], None],
    note: Callable[[str], None],
    sources: str | None = None,
) -> Result:
    """Write the token files and reports of a job.

    Args:
        job: its inputs and outputs.
        settings, show, note: as for `preprocess`.
        loading: loads the tokenizer.
        sources: name of all inputs together, which must hold valid records; None: the job has only some of them.

    Raises:
        DataError: as `preprocess`.
    """
    with TextToTokens.start(job, settings, loading, show, note) as run:
        if run.backend.note:
            note(run.backend.note)
        run.encode()
        state = run.state
        if sources is not None:
            state.check_complete(sources, settings)
            if not state.counts.tokens:
                note(f"the files hold no tokens: the text of all {state.counts.written:,} documents is empty")
        quarantine = quarantine_path(job.output_prefix, job.finals) if state.counts.quarantined else None
        hashes = run.finish()
        outputs = run.output.build_indexes()
        report, *_ = _write_reports(job.finals, job.hashed, hashes, settings, run, loading.vocabulary_hash(), outputs)
        run.publish(quarantine)
        if quarantine is None:
            remove_quarantine(job.output_prefix, job.finals)
        return Result(tuple(job.finals), report, quarantine, state.counts, state.bad, run.backend)


def _write_reports(
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
        inputs, hashes: the files that were read, and the sha256 of each ("" for standard input and one with an etag).
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
        "megalaunch": __version__,
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
            | ({"etag": entry.etag} if entry.etag else {})
            for entry, digest in zip(inputs, hashes, strict=True)
        ],
        "fingerprint": job_fingerprint(inputs, settings),
        "bad_records": state.bad,
    }
    reports = []
    for prefix in prefixes:
        files = {name: outputs[name] for name in (bin_path(prefix).name, idx_path(prefix).name)}
        counts = asdict(state.counts) | {"tokens": files[bin_path(prefix).name]["bytes"] // width}
        reports.append(write_report(prefix, {**content, "counts": counts, "outputs": files}))
    return reports
