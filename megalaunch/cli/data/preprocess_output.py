"""What `megalaunch preprocess` prints: progress, notes, the reason of a failure, and the summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalaunch.cli.output.progress import ProgressLine
from megalaunch.format.numbers import format_bytes, format_counted, format_duration

if TYPE_CHECKING:
    from megalaunch.data.preprocess.preprocess import Result
    from megalaunch.data.preprocess.state import Progress

_TERMINAL_INTERVAL, _LOG_INTERVAL = 0.2, 10.0  # seconds between two progress lines
_BAR = 24  # characters


@contextmanager
def errors_shown(
    interrupted: str, log_interval: int | None, failed: Callable[[int, str], None] = lambda code, reason: None
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows the progress; end the command with the reason if preprocessing fails.

    Args:
        interrupted: what holds after Ctrl-C.
        log_interval: documents between two progress lines.
        failed: called with the exit code and the reason before the command ends.
    """
    line = ProgressLine(_TERMINAL_INTERVAL, _LOG_INTERVAL)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy then has no threads, and the workers can be forked
    from megalaunch.data.errors import DataError
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse

    def end(code: ExitCode, reason: str) -> NoReturn:
        line.clear()
        failed(code, reason)
        refuse(reason, code)

    try:
        yield _show_progress(line, log_interval)
    except DataError as error:
        end(ExitCode.DATA, str(error))
    except KeyboardInterrupt:
        end(ExitCode.INTERRUPTED, f"interrupted; {interrupted}")
    line.clear()


def note(text: str) -> None:
    """Print a note on standard error."""
    sys.stderr.write(f"note: {text}\n")


def _show_progress(line: ProgressLine, documents: int | None) -> Callable[[Progress], None]:
    """Return a function that updates the progress line when it is due, and every `documents` documents."""
    counted = 0

    def show(progress: Progress) -> None:
        nonlocal counted
        passed = documents is not None and progress.documents // documents > counted // documents
        counted = progress.documents
        if passed or line.due:
            line.show(_line(progress))

    return show


def _line(progress: Progress) -> str:
    seconds = max(progress.seconds, 1e-9)
    speed = progress.bytes_read / seconds
    rates = f"{progress.documents:,} documents  {format_bytes(speed)}/s  {progress.tokens / seconds:,.0f} tokens/s"
    if not progress.bytes_total:  # the size of standard input is not known
        return f"{format_bytes(progress.bytes_read)}  {rates}"
    share = min(progress.bytes_read / progress.bytes_total, 1.0)
    bar = "#" * round(share * _BAR)
    left = max(progress.bytes_total - progress.bytes_read, 0) / max(speed, 1e-9)
    return f"[{bar:.<{_BAR}}] {share:4.0%}  {rates}  {format_duration(left)} left"


def complete_text(prefix: Path) -> str:
    """Return what is printed in place of writing files that are there already."""
    return f"{prefix}: already complete, of the same inputs, tokenizer and settings; nothing is written"


def summary(result: Result) -> str:
    """Return the counts, the records left out, and the files of a result as text."""
    counts = result.counts
    documents = format_counted(f"{counts.written:,}", "document")
    tokens = format_counted(f"{counts.tokens:,}", "token")
    lines = [
        f"{documents}, {tokens}, {format_bytes(counts.bytes_read)} in {counts.seconds:.1f} s ({result.engine.name})"
    ]
    left_out = counts.skipped + counts.quarantined
    if left_out:
        from megalaunch.data.preprocess.state import records_left_out

        lines.append(records_left_out(left_out, counts.documents, result.bad_records))
    if result.quarantine is not None:
        lines.append(f"they are in {result.quarantine}")
    lines += [f"{prefix}.bin, .idx" for prefix in result.prefixes]
    lines[-1] += f"; report: {result.report}"
    return "\n".join(lines)
