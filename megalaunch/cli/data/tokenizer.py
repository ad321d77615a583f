"""`megalaunch tokenizer`: train a byte-level BPE tokenizer, or inspect one of any supported kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megalaunch.cli.data.path_names import tokenizer_output
from megalaunch.cli.help_pages import CommandGroup
from megalaunch.cli.usage_errors import ParametersCommand

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train or inspect a tokenizer.",
)


@app.command(cls=ParametersCommand)
def train(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUTS", help="As for preprocess: files, folders, globs, hf://datasets/ORG/NAME."),
    ],
    output: Annotated[
        Path, typer.Option(parser=tokenizer_output, metavar="OUTPUT", help="The tokenizer.json to write.")
    ],
    vocab_size: Annotated[int, typer.Option(min=257, help="Vocabulary size in tokens.")] = 32_000,
    json_key: Annotated[
        list[str] | None, typer.Option(help="Key of the text; may be repeated.", show_default="text")
    ] = None,
    max_mb: Annotated[
        float, typer.Option(min=0.001, help="Maximum MB of training text; memory grows with it.")
    ] = 500.0,
) -> None:
    """Train a byte-level BPE tokenizer with <|endoftext|> on text files; deterministic."""
    from megalaunch.data.errors import DataError
    from megalaunch.data.train_tokenizer import train_tokenizer_on
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse
    from megalaunch.runs.hub_paths import local_data

    try:
        trained, text = train_tokenizer_on(local_data(inputs), tuple(json_key or ["text"]), vocab_size, output, max_mb)
    except DataError as error:
        refuse(str(error), ExitCode.DATA)
    except KeyboardInterrupt:
        refuse("interrupted; nothing was written", ExitCode.INTERRUPTED)
    typer.echo(f"{output}: {trained.vocab_size:,} tokens, trained on {text.characters / 1e6:,.1f} million characters")
    if (left_out := text.left_out()) is not None:
        typer.echo(f"note: {left_out}")
    if trained.vocab_size < vocab_size:
        typer.echo(f"note: the text is too small for {vocab_size:,} tokens")


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A tokenizer file of any supported kind, its folder, or hf://ORG/NAME.")],
    merges: Annotated[Path | None, typer.Option(help="Merges of a GPT-2 vocabulary; default: next to it.")] = None,
    text: Annotated[str | None, typer.Option(help="Show how this text is tokenized.")] = None,
) -> None:
    """Show vocabulary size, special tokens, how a text is tokenized, and which backend preprocess would use."""
    from megalaunch.data.errors import DataError
    from megalaunch.data.indexed_dataset.builder import token_type
    from megalaunch.data.preprocess.encoder_backend import select_backend
    from megalaunch.data.preprocess.settings import EngineChoice
    from megalaunch.data.tokenizer.tokenizer import load_tokenizer, tokenizer_file
    from megalaunch.rundir.outcome import ExitCode
    from megalaunch.runs.errors import refuse
    from megalaunch.runs.hub_paths import local_tokenizer

    path = local_tokenizer(path)
    try:
        loaded = load_tokenizer(path, merges)
    except DataError as error:
        refuse(str(error), ExitCode.DATA)
    engine = select_backend(EngineChoice.AUTO, loaded, [])
    stored = token_type(loaded.vocab_size).name
    typer.echo(f"{tokenizer_file(path)}: {loaded.kind()}, {loaded.vocab_size:,} tokens, stored as {stored}")
    end = loaded.eod_id
    typer.echo("end of document: " + ("none" if end is None else f"{loaded.token(end)} ({end})"))
    special = loaded.special_tokens()
    typer.echo(f"special tokens: {len(special)}" + (f": {' '.join(special[:20])}" if special else ""))
    typer.echo(f"vocabulary sha256: {loaded.vocabulary_hash()}")
    typer.echo(f"preprocess encodes with {engine.name}" + (f" ({engine.note})" if engine.note else ""))
    if text is not None:
        ids = loaded.encode(text)
        typer.echo(f"{len(ids)} tokens: " + " ".join(f"{number}:{loaded.token(number)!r}" for number in ids))
