"""`megalaunch preprocess`: text and jsonl files to token files in Megatron's layout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.data.preprocess_settings import Format, OnBadRecord, Settings

if TYPE_CHECKING:
    from megalaunch.data.preprocess import Progress, Result

_TERMINAL_INTERVAL, _PLAIN_INTERVAL = 0.2, 10.0  # seconds between two progress lines


def preprocess(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUTS", help="Files, folders or globs of text or jsonl.")],
    output_prefix: Annotated[Path, typer.Option(help="The files are OUTPUT_PREFIX_<key>_document.bin and .idx.")],
    tokenizer: Annotated[Path, typer.Option(help="A tokenizer.json.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    append_eod: Annotated[bool, typer.Option("--append-eod", help="End every document with the end token.")] = False,
    json_key: Annotated[str, typer.Option(help="Key of the text in a jsonl record.")] = "text",
    format: Annotated[Format, typer.Option(help="What the inputs are; auto goes by the suffix.")] = Format.AUTO,
    on_bad_record: Annotated[
        OnBadRecord, typer.Option(help="What to do with a record that cannot be read.")
    ] = OnBadRecord.STOP,
) -> None:
    """Turn text into token files (.bin and .idx in Megatron's layout) to train on."""
    from megalaunch.cli.exit import refuse
    from megalaunch.data import preprocess as work
    from megalaunch.data.errors import DataError
    from megalaunch.rundir.outcome import ExitCode

    settings = Settings(
        tokenizer=tokenizer,
        workers=workers or len(os.sched_getaffinity(0)),
        append_eod=append_eod,
        json_key=json_key,
        format=format,
        on_bad_record=on_bad_record,
    )
    try:
        result = work.preprocess(inputs, output_prefix.expanduser(), settings, _progress_line())
    except DataError as error:
        _end_line()
        refuse(str(error), ExitCode.DATA)
    except KeyboardInterrupt:
        _end_line()
        refuse("interrupted; nothing was written", ExitCode.INTERRUPTED)
    _end_line()
    typer.echo(_summary(result))


def _progress_line() -> Callable[[Progress], None]:
    """Shows progress on stderr: one line drawn over on a terminal, else a line now and then."""
    terminal = sys.stderr.isatty()
    interval = _TERMINAL_INTERVAL if terminal else _PLAIN_INTERVAL
    shown = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal shown
        if time.monotonic() - shown < interval:
            return
        shown = time.monotonic()
        line = _line(progress)
        sys.stderr.write(f"\r\033[K{line}" if terminal else f"{line}\n")
        sys.stderr.flush()

    return show


def _end_line() -> None:
    """Clear the line that is drawn over, where there is one."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()


def _line(progress: Progress) -> str:
    share = progress.bytes_read / max(progress.bytes_total, 1)
    speed = progress.bytes_read / max(progress.seconds, 1e-9)
    left = (progress.bytes_total - progress.bytes_read) / max(speed, 1e-9)
    return (
        f"{share:4.0%}  {progress.documents:,} documents  {progress.tokens:,} tokens  "
        f"{speed / 1e6:.1f} MB/s  {left:,.0f} s left"
    )


def _summary(result: Result) -> str:
    counts = result.counts
    lines = [
        f"{counts.written:,} documents, {counts.tokens:,} tokens, {counts.bytes_read / 1e6:,.1f} MB "
        f"in {counts.seconds:.1f} s",
        f"{result.prefix}.bin, .idx; report: {result.report.name}",
    ]
    if counts.skipped:
        first = result.bad_records[0]
        lines.insert(
            1,
            f"{counts.skipped:,} of {counts.documents:,} records left out, the first: "
            f"{first['file']}, line {first['line']}: {first['cause']}",
        )
    return "\n".join(lines)
