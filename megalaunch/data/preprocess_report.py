"""The report beside the output of a preprocessing: counts, settings, hashes and what was left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import megalaunch
from megalaunch.data.encode_engine import Engine
from megalaunch.data.errors import cannot
from megalaunch.data.inputs import Input
from megalaunch.data.preprocess_settings import Settings
from megalaunch.data.preprocess_state import State
from megalaunch.data.publish import UnfinishedFile
from megalaunch.data.tokenizer import Tokenizer, tokenizer_file

_RESULT_SETTINGS = ("workers", "append_eod", "json_keys", "format", "on_bad_record", "language", "record_bytes")


def report_path(prefix: Path) -> Path:
    """The report that belongs to a prefix."""
    return prefix.with_name(prefix.name + ".json")


def write_report(
    prefix: Path,
    inputs: Sequence[Input],
    hashes: Sequence[str],
    settings: Settings,
    tokenizer: Tokenizer,
    engine: Engine,
    state: State,
) -> Path:
    """Write it whole or not at all; DataError when that fails."""
    path = tokenizer_file(settings.tokenizer)
    chosen = asdict(settings)
    content: dict[str, Any] = {
        "megalaunch": megalaunch.__version__,
        "counts": asdict(state.counts),
        "settings": {"tokenizer": str(path), **{name: chosen[name] for name in _RESULT_SETTINGS}},
        "engine": {"name": engine.name, "note": engine.note},
        "tokenizer": {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "inputs": [
            {"file": str(entry.path), "bytes": entry.size, "sha256": digest}
            for entry, digest in zip(inputs, hashes, strict=True)
        ],
        "bad_records": state.bad,
    }
    report = report_path(prefix)
    unfinished = UnfinishedFile(report)
    try:
        unfinished.file.write((json.dumps(content, indent=2) + "\n").encode())
        unfinished.sync()
        unfinished.publish()
    except OSError as error:
        raise cannot("write it", report, error, "Free space there, then go on with --resume.") from error
    finally:
        unfinished.discard()
    return report
