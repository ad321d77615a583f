"""Text to token files in Megatron's format, in order, with several processes; needs no torch and no process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import chunks
from megalaunch.data.preprocess.encoder_backend import EncoderBackend
from megalaunch.data.preprocess.inputs import find_inputs
from megalaunch.data.preprocess.pipeline import Job, TextToTokens
from megalaunch.data.preprocess.report import write_reports
from megalaunch.data.preprocess.settings import Settings
from megalaunch.data.preprocess.state import Progress
from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader


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
        DataError: no file has its final name then, and finished work is saved for `settings.resume` (work_dir.py).
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise DataError("preprocessing was started by torchrun, once a process", fix="Start it by itself, once.")
    with loader or TokenizerLoader.start(settings.tokenizer, settings.merges, settings.tiktoken) as loading:
        found = find_inputs(inputs, settings.format, note)
        level = "document" if settings.language is None else "sentence"
        finals = [output_prefix.with_name(f"{output_prefix.name}_{key}_{level}") for key in settings.json_keys]
        job = Job(found, lambda start: chunks(found, settings, start), output_prefix, finals)
        with TextToTokens.start(job, settings, loading, show, note) as run:
            if run.backend.note:
                note(run.backend.note)
            run.encode()
            state = run.state
            state.check_complete(", ".join(inputs), settings)
            if not state.counts.tokens:
                note(f"the files hold no tokens: the text of all {state.counts.written:,} documents is empty")
            quarantine = None
            if state.counts.quarantined:
                quarantine = finals[0].with_name(f"{output_prefix.name}_quarantine.jsonl")
            hashes = run.finish()
            outputs = run.output.build_indexes()
            report, *_ = write_reports(finals, found, hashes, settings, run, loading.vocabulary_hash(), outputs)
            run.publish(quarantine)
            return Result(tuple(finals), report, quarantine, state.counts, state.bad, run.backend)
