"""`megalaunch data`: inspect, verify, merge and split token files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from megalaunch.cli.data import path_names
from megalaunch.cli.data.cache import cache
from megalaunch.cli.help_pages import CommandGroup
from megalaunch.cli.output.progress import percent_progress
from megalaunch.cli.usage_errors import ParametersCommand
from megalaunch.format.numbers import format_counted
from megalaunch.installation import install_command

if TYPE_CHECKING:
    from megalaunch.data.indexed_dataset.dataset import IndexedTokens
    from megalaunch.data.indexed_dataset.statistics import Statistics
    from megalaunch.data.indexed_dataset.verify import VerificationResult
    from megalaunch.data.tokenizer.tokenizer import Tokenizer

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Inspect, verify, merge and split token files.",
)

Prefix = Annotated[
    Path,
    typer.Argument(parser=path_names.file_prefix, metavar="PREFIX", help="Path of the files without .bin and .idx."),
]
TokenizerPath = Annotated[Path | None, typer.Option(help="The tokenizer (default: that of the report).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
_SHOWN_CHARACTERS, _SHOWN_IDS = 400, 12


@app.command()
def inspect(
    prefix: Prefix,
    tokenizer: TokenizerPath = None,
    documents: Annotated[int, typer.Option(min=0, help="Number of first documents to show.")] = 3,
    png: Annotated[Path | None, typer.Option(help="Write a plot of the lengths to this file.")] = None,
) -> None:
    """Show counts, document lengths, and the first documents as text."""
    with _data_errors():
        from megalaunch.data.indexed_dataset.dataset import IndexedTokens
        from megalaunch.data.indexed_dataset.statistics import draw_histogram, histogram_lines, statistics

        tokens = IndexedTokens(prefix)
        found = statistics(tokens)
        typer.echo(f"{_sizes(found)} of {tokens.dtype.name} ({found.tokens * tokens.dtype.itemsize / 1e6:,.1f} MB)")
        typer.echo(f"a document: {found.shortest:,} to {found.longest:,} tokens, {found.mean:,.1f} on average")
        for line in histogram_lines(found):
            typer.echo(line)
        if png is not None:
            try:
                draw_histogram(found, png)
            except ImportError:
                _refuse(f"the plot needs matplotlib: {install_command('megalaunch[train]')}.")
            except OSError as error:
                _refuse(f"cannot write {png}: {error.strerror}.")
        _show_documents(tokens, _load_tokenizer(prefix, tokenizer), documents)


@app.command()
def verify(
    prefix: Prefix,
    tokenizer: TokenizerPath = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Ids must be below this.")] = None,
) -> None:
    """Check every invariant, every token id and, where a report has hashes, every byte."""
    with _data_errors():
        from megalaunch.data.indexed_dataset.verify import verify as check

        loaded = None if tokenizer is None else _load_tokenizer(prefix, tokenizer)
        size = vocab_size if loaded is None else loaded.vocab_size
        found = check(prefix, size, percent_progress(prefix.name))
        known = found.vocab_size is not None
        unknown = [] if known else ["ids (unknown vocabulary size: give --tokenizer or --vocab-size)"]
        unknown += [] if found.hashed else ["bytes (no report next to the files)"]
        result = "valid" if known else "no error found"
        typer.echo(
            f"{prefix}: {result}. {_sizes(found)}"
            + ("" if found.largest is None else f", largest id {found.largest:,}")
            + ("; all checksums match" if found.hashed else "")
            + (f"; not compared: {', '.join(unknown)}" if unknown else "")
        )


@app.command(cls=ParametersCommand)
def merge(
    prefixes: Annotated[list[Path], typer.Argument(help="Prefixes in order, or folders (sorted by name).")],
    output_prefix: Annotated[
        Path,
        typer.Option(
            parser=path_names.output_prefix,
            metavar="OUTPUT_PREFIX",
            help="Path of the files to write, without .bin and .idx.",
        ),
    ],
    overwrite: Overwrite = False,
) -> None:
    """Merge token files into one: the same bytes as preprocessing all their texts at once."""
    with _data_errors():
        from megalaunch.data.indexed_dataset.merge import merge as merge_files

        sources = [path.expanduser() for path in prefixes]
        merged = merge_files(sources, output_prefix.expanduser(), overwrite=overwrite)
        typer.echo(f"{merged.prefix}: {_size(merged)}")


@app.command(cls=ParametersCommand)
def split(
    prefix: Prefix,
    output_prefix: Annotated[
        Path,
        typer.Option(
            parser=path_names.output_prefix, metavar="OUTPUT_PREFIX", help="Writes OUTPUT_PREFIX_0, OUTPUT_PREFIX_1..."
        ),
    ],
    shares: Annotated[str | None, typer.Option(help="Relative sizes of the parts, e.g. 99,1.")] = None,
    parts: Annotated[int | None, typer.Option(min=1, help="Number of equal parts.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Split token files into consecutive parts by documents; merging the parts gives the same bytes again."""
    if (shares is None) == (parts is None):
        _refuse("give either --shares or --parts.", usage=True)
    with _data_errors():
        from megalaunch.data.indexed_dataset.dataset import IndexedTokens
        from megalaunch.data.indexed_dataset.merge import split as split_files

        made = split_files(prefix.expanduser(), output_prefix.expanduser(), _shares(shares, parts), overwrite=overwrite)
        for part in made:
            written = IndexedTokens(part)
            typer.echo(f"{part}: {_size(written)}")


def _shares(shares: str | None, parts: int | None) -> list[float]:
    if shares is None:
        return [1.0] * (parts or 1)
    try:
        numbers = [float(share) for share in shares.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0 or not 0 < sum(numbers) < float("inf"):
        _refuse(f"--shares {shares}: must be numbers of at least 0 with a sum above 0, e.g. 99,1.", True)
    return numbers


def _sizes(found: Statistics | VerificationResult) -> str:
    counts = {"document": found.documents, "sequence": found.sequences, "token": found.tokens}
    return ", ".join(format_counted(f"{count:,}", noun) for noun, count in counts.items())


def _size(written: IndexedTokens) -> str:
    documents = format_counted(f"{written.num_documents:,}", "document")
    return f"{documents}, {format_counted(f'{written.num_tokens:,}', 'token')}"


def _load_tokenizer(prefix: Path, given: Path | None) -> Tokenizer | None:
    """Return the given tokenizer, else the report's if its file still exists, else None."""
    from megalaunch.data.indexed_dataset.report import read_report
    from megalaunch.data.tokenizer.tokenizer import load_tokenizer

    if given is not None:
        return load_tokenizer(given)
    report = read_report(prefix)
    named = None if report is None else report.get("settings", {}).get("tokenizer")
    if report is None or not isinstance(named, str) or not Path(named).is_file():
        return None
    merges = report["settings"].get("merges")
    loaded = load_tokenizer(named, merges if isinstance(merges, str) else None)
    return loaded if loaded.vocabulary_hash() == report["tokenizer"].get("vocabulary_sha256") else None


def _show_documents(tokens: IndexedTokens, tokenizer: Tokenizer | None, count: int) -> None:
    if count and tokenizer is None:
        typer.echo("showing ids: the tokenizer is unknown (give --tokenizer)")
    for document in range(min(count, tokens.num_documents)):
        first, last = int(tokens.documents[document]), int(tokens.documents[document + 1])
        ids = [number for sequence in range(first, last) for number in tokens.tokens(sequence, 0, None).tolist()[:2000]]
        size = format_counted(f"{tokens.tokens_in(range(first, last)):,}", "token")
        sequences = format_counted(last - first, "sequence")
        typer.echo(f"--- document {document}: {size} in {sequences}: {_start(ids)}")
        if tokenizer is not None and ids:
            text = tokenizer.decode(ids[:_SHOWN_CHARACTERS], special=True)
            typer.echo(_printable(text[:_SHOWN_CHARACTERS]) + (" ..." if len(text) > _SHOWN_CHARACTERS else ""))


app.command()(cache)


def _printable(text: str) -> str:
    """Return the text with control characters replaced, which a terminal would interpret."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\N{MIDDLE DOT}" for c in text)


def _start(ids: list[int]) -> str:
    return " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")


@contextmanager
def _data_errors() -> Iterator[None]:
    """End the command with exit code 3 and the message of a DataError."""
    from megalaunch.data.errors import DataError
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse

    try:
        yield
    except DataError as error:
        refuse(str(error), ExitCode.DATA)
    except KeyboardInterrupt:
        refuse("interrupted", ExitCode.INTERRUPTED)


def _refuse(text: str, usage: bool = False) -> NoReturn:
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse

    refuse(text, ExitCode.CONFIGURATION if usage else ExitCode.DATA)
