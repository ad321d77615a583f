"""Text and jsonl files to one pair of token files, in order, by several processes: no torch, no process group."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megalaunch.data.corpus import CorpusFile, find_corpus, open_source
from megalaunch.data.encode_records import EncodedRecord, Encoder, RawRecord, encode_in_worker, start_worker
from megalaunch.data.errors import DataError, cannot
from megalaunch.data.preprocess_settings import Format, OnBadRecord, Settings
from megalaunch.data.publish import UnfinishedFile
from megalaunch.data.token_writer import TokenWriter, token_type
from megalaunch.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file

_CHUNK_BYTES = 1 << 18
_BAD_RECORDS_LISTED = 1000


@dataclass
class Progress:
    """Counts so far; documents = written + skipped. Bytes are those of the inputs."""

    bytes_total: int
    bytes_read: int = 0
    documents: int = 0
    written: int = 0
    skipped: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """Where the files are, the final counts, and the first bad records as (file, line, cause)."""

    prefix: Path
    report: Path
    counts: Progress
    bad_records: list[dict[str, Any]]


def preprocess(
    inputs: Sequence[str], output_prefix: Path, settings: Settings, show: Callable[[Progress], None]
) -> Result:
    """Write `<output_prefix>_<key>_document.bin/.idx`, and `.json` with counts, settings and hashes.

    Inputs are files, folders and globs; documents keep their order whatever the number of workers. `show`
    is called after each chunk. Raises DataError, and then leaves nothing under the final names.
    """
    started = time.monotonic()
    files = [file for source in inputs for file in find_corpus(source, settings.json_key).files]
    path = tokenizer_file(settings.tokenizer)
    tokenizer = load_tokenizer(path)
    end = tokenizer.require_eod(path, "Leave out --append-eod.") if settings.append_eod else None
    prefix = output_prefix.with_name(f"{output_prefix.name}_{settings.json_key}_document")
    counts = Progress(bytes_total=sum(file.size() for file in files))
    bad: list[dict[str, Any]] = []
    chunks = _chunks(files, settings.format)
    encoded = _encoded(chunks, settings, tokenizer, path, end)
    with TokenWriter(prefix, token_type(tokenizer.vocab_size)) as writer:
        for records, results in encoded:
            for record, result in zip(records, results, strict=True):
                _write(writer, record, result, counts, bad, settings.on_bad_record)
            counts.tokens, counts.seconds = writer.num_tokens, time.monotonic() - started
            show(counts)
        if not counts.documents:
            raise DataError("the inputs hold no documents", file=", ".join(inputs), fix="Give files with text.")
    report = _write_report(prefix, files, settings, tokenizer, counts, bad)
    return Result(prefix, report, counts, bad)


def _write(
    writer: TokenWriter,
    record: RawRecord,
    result: EncodedRecord,
    counts: Progress,
    bad: list[dict[str, Any]],
    on_bad_record: OnBadRecord,
) -> None:
    counts.documents += 1
    counts.bytes_read += len(record.content)
    if result.error is not None:
        if on_bad_record is OnBadRecord.STOP:
            fix = f"{result.error.fix} To leave such records out: --on-bad-record skip.".strip()
            raise DataError(result.error.cause, file=record.path, record=result.error.record, fix=fix)
        counts.skipped += 1
        if len(bad) < _BAD_RECORDS_LISTED:
            bad.append({"file": str(record.path), "line": result.error.record, "cause": result.error.cause})
        return
    for sequence in result.sequences:
        writer.add_sequence(sequence)
    writer.end_document()
    counts.written += 1


def _chunks(files: Sequence[CorpusFile], kind: Format) -> Iterator[list[RawRecord]]:
    """The records of all files in order, in lists of about _CHUNK_BYTES."""
    chunk: list[RawRecord] = []
    size = 0
    for record in _records(files, kind):
        chunk.append(record)
        size += len(record.content)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _records(files: Sequence[CorpusFile], kind: Format) -> Iterator[RawRecord]:
    for file in files:
        with open_source(file.path) as source:
            if kind is Format.JSONL or (kind is Format.AUTO and file.holds_records):
                for number, line in enumerate(source, start=1):
                    yield RawRecord(file.path, number, line)
            else:
                yield RawRecord(file.path, None, source.read())


def _encoded(
    chunks: Iterator[list[RawRecord]], settings: Settings, tokenizer: Tokenizer, path: Path, end: int | None
) -> Iterator[tuple[list[RawRecord], list[EncodedRecord]]]:
    """Every chunk with its results, in order; at most a few chunks are in memory at a time."""
    if settings.workers <= 1:
        encoder = Encoder(tokenizer, settings.json_key, end)
        yield from ((chunk, encoder.encode(chunk)) for chunk in chunks)
        return
    # Spawned, not forked: the tokenizer library has threads of its own in this process.
    pool = ProcessPoolExecutor(settings.workers, get_context("spawn"), start_worker, (path, settings.json_key, end))
    waiting: deque[tuple[list[RawRecord], Future[list[EncodedRecord]]]] = deque()
    try:
        for chunk in islice(chunks, 2 * settings.workers):
            waiting.append((chunk, pool.submit(encode_in_worker, chunk)))
        while waiting:
            chunk, future = waiting.popleft()
            results = future.result()
            for following in islice(chunks, 1):
                waiting.append((following, pool.submit(encode_in_worker, following)))
            yield chunk, results
    except BrokenProcessPool:
        raise DataError(
            "a worker process died, perhaps for lack of memory", fix="Give fewer --workers, or free memory."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _write_report(
    prefix: Path,
    files: Sequence[CorpusFile],
    settings: Settings,
    tokenizer: Tokenizer,
    counts: Progress,
    bad: list[dict[str, Any]],
) -> Path:
    report = prefix.with_name(prefix.name + ".json")
    path = tokenizer_file(settings.tokenizer)
    content = {
        "counts": asdict(counts),
        "settings": {**asdict(settings), "tokenizer": str(path)},
        "tokenizer": {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "inputs": [{"file": str(file.path), "bytes": file.size()} for file in files],
        "bad_records": bad,
    }
    unfinished = UnfinishedFile(report)
    try:
        unfinished.file.write((json.dumps(content, indent=2) + "\n").encode())
        unfinished.sync()
        unfinished.publish()
    except OSError as error:
        raise cannot("write it", report, error, "Free space there.") from error
    finally:
        unfinished.discard()
    return report
