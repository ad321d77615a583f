"""Progress of a preprocessing run: counts, bad records, and the position in the inputs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess.chunking import Chunk, Position
from megalaunch.data.preprocess.encode_chunk import BadRecord, Encoded
from megalaunch.data.preprocess.inputs import Input
from megalaunch.data.preprocess.settings import OnBadRecord, Settings

_BAD_RECORDS_LISTED = 1000
# Increment when the same inputs and settings would give different files.
_RECIPE_VERSION = 2
_MORE_BAD = "Mend the input, or raise --max-bad."


@dataclass
class Progress:
    """Counts so far; documents = written + skipped + quarantined. Bytes are those of the inputs as stored."""

    bytes_total: int
    bytes_read: int = 0
    documents: int = 0
    written: int = 0
    skipped: int = 0
    quarantined: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class State:
    """Everything that a resumed run needs; `line` is the line of `position` in its file, counted from 0."""

    counts: Progress
    position: Position = field(default_factory=lambda: Position(0, 0))
    line: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def count_chunk(self, chunk: Chunk, encoded: Encoded, settings: Settings) -> list[bytes]:
        """Count a chunk and return its lines for the quarantine.

        Raises:
            DataError: a bad record stops the run, or there are more than `max_bad`. Nothing is counted then.
        """
        on_bad_record, stop_fix = settings.on_bad_record, settings.fixes.bad_record
        lines: list[bytes] = []
        listed: list[dict[str, Any]] = []
        for bad in encoded.bad:
            line = bad.line(self.line)
            if on_bad_record is OnBadRecord.STOP:
                raise DataError(bad.cause, file=bad.path, record=line, fix=f"{bad.fix} {stop_fix}".strip())
            if len(self.bad) + len(listed) < _BAD_RECORDS_LISTED:
                listed.append({"file": str(bad.path), "line": line, "cause": bad.cause})
            if on_bad_record is OnBadRecord.QUARANTINE:
                lines.append(_quarantine_line(bad, line))
        counts, left_out = self.counts, len(encoded.bad)
        allowed, found = settings.max_bad.count, counts.skipped + counts.quarantined + left_out
        if allowed is not None and found > allowed:
            first = _first_of([*self.bad, *listed])
            raise DataError(f"{found:,} records are bad, --max-bad allows {settings.max_bad}{first}", fix=_MORE_BAD)
        self.bad += listed
        counts.documents += encoded.records
        counts.written += encoded.records - left_out
        counts.quarantined += len(lines)
        counts.skipped += left_out - len(lines)
        counts.tokens += sum(key.tokens.size for key in encoded.keys)
        counts.bytes_read += chunk.stored
        self.line = self.line + encoded.lines if chunk.end.file == self.position.file else 0
        self.position = chunk.end
        return lines

    def check_complete(self, sources: str, settings: Settings) -> None:
        """Raise DataError if the inputs had no valid documents, or more bad ones than `max_bad` allows."""
        counts = self.counts
        left_out = counts.skipped + counts.quarantined
        if not counts.documents:
            raise DataError("the inputs hold no documents", file=sources, fix="Give files with text.")
        if not counts.written:
            raise DataError(f"none of the {left_out:,} records can be used{_first_of(self.bad)}", file=sources)
        share = settings.max_bad.share
        if share is not None and left_out > share * counts.documents:
            cause = (
                f"{left_out:,} of {counts.documents:,} records are bad, {left_out / counts.documents:.2%}; "
                f"--max-bad allows {settings.max_bad}{_first_of(self.bad)}"
            )
            raise DataError(cause, file=sources, fix=_MORE_BAD)

    def to_save(self) -> dict[str, Any]:
        """Return the state as JSON data for `load`."""
        return asdict(self)

    @staticmethod
    def load(saved: dict[str, Any]) -> State:
        """Return the state from the data of `to_save`."""
        return State(
            counts=Progress(**saved["counts"]),
            position=Position(**saved["position"]),
            line=saved["line"],
            bad=saved["bad"],
            complete=saved["complete"],
        )


def _first_of(bad: Sequence[dict[str, Any]]) -> str:
    if not bad:
        return ""
    place = bad[0]["file"] + ("" if bad[0]["line"] is None else f", line {bad[0]['line']}")
    return f", the first: {place}: {bad[0]['cause']}"


def _quarantine_line(bad: BadRecord, line: int | None) -> bytes:
    content = bad.content.decode("utf-8", "backslashreplace")
    entry = {"file": str(bad.path), "line": line, "cause": bad.cause, "record": content}
    return json.dumps(entry).encode() + b"\n"


def resume_fingerprint(inputs: Sequence[Input], settings: Settings, tokenizer: str) -> dict[str, str]:
    """Hash everything that must be unchanged for a resumed run to write the same bytes, by name.

    `tokenizer` is the content of a tokenizer.json.
    """
    files = [[str(entry.path.absolute()), entry.format, entry.size, entry.changed] for entry in inputs]
    written = [settings.append_eod, settings.add_special_tokens, list(settings.json_keys), settings.language]
    options = [_RECIPE_VERSION, *written, settings.record_bytes]
    parts = {"inputs": json.dumps(files), "tokenizer": tokenizer, "settings": json.dumps(options)}
    return {name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest() for name, text in parts.items()}
