"""Check before anything else that a run's corpus exists and is not empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megalaunch.format.numbers import format_counted
from megalaunch.plan.findings import Finding, Severity

if TYPE_CHECKING:
    from megalaunch.plan.check import HasOrigin
    from megalaunch.schema import RunSpec


def check_corpus(spec: RunSpec, origins: Mapping[str, HasOrigin] | None = None) -> list[Finding]:
    """Return errors for a corpus or conversations that cannot be read on this machine or are empty; [] for other data.

    A note is added for each file that is skipped in a dataset folder. Files are found as by the preparation of data.
    """
    from megalaunch.schema.data import STANDARD_LIBRARY
    from megalaunch.schema.remote import is_address, is_hub_address

    found = []
    for key in ("corpus", "sft_data"):
        source = getattr(spec.data, key)
        if source is None or source == STANDARD_LIBRARY or is_hub_address(source):
            continue
        if is_address(source):  # rules/launching.py reports it
            continue
        origin = origins.get(f"data.{key}") if origins else None
        where = origin.where if origin and origin.kind != "default" else ""
        severity, messages = _find_documents(source, spec.data.json_key)
        found += [Finding("data.corpus_exists", severity, f"data.{key}", message, origin=where) for message in messages]
    return found


def _find_documents(source: str, json_key: str) -> tuple[Severity, list[str]]:
    from megalaunch.data.errors import DataError
    from megalaunch.data.preprocess.corpus.documents import find_corpus
    from megalaunch.schema.remote import is_hub_name

    try:
        corpus = find_corpus(source, json_key)
        size = corpus.size()
    except DataError as error:
        hint = f"; a dataset of the Hugging Face Hub is hf://{source}" if is_hub_name(source) else ""
        return "error", [(f"{error.file}: {error.cause}" if error.file is not None else error.cause) + hint]
    except (ValueError, RuntimeError, OSError) as error:  # a NUL byte, no such home
        return "error", [f"{source}: {error}"]
    if not size:
        return "error", [f"{source}: it is empty ({format_counted(f'{len(corpus.files):,}', 'file')} without a byte)"]
    return "note", list(corpus.notes)
