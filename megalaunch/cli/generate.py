"""`megalaunch generate`: a trained model continues a text."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from megalaunch.rundir.outcome import ExitCode


def generate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT|HF_DIR", help="A run, a checkpoint, or a Hugging Face folder.")
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token; 1: as learnt.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that hold this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same text.")] = 1234,
) -> None:
    """Let a trained model continue a text: the prompt and what follows go to standard output as they are written.

    Ends with the document that the model writes, or after the given number of tokens.
    """
    from megalaunch.cli.exit import refuse

    source = source.expanduser()
    if not source.is_dir():
        refuse(f"{source} is no directory; give a run, one of its checkpoints/step_<number> or a Hugging Face folder")
    if find_spec("torch") is None:
        refuse("generate needs torch, which is not installed; add it with: pip install 'megalaunch[train]'")
    from megalaunch.engine import api

    try:
        sampling = api.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        model = api.open_model(source, report=lambda message: typer.echo(message, err=True))
        api.fit_threads(model)
        pieces = api.continue_text(model, prompt, max_new_tokens, sampling)
        note = api.length_note(model, prompt, max_new_tokens)
        if note:
            typer.echo(note, err=True)
        _show(prompt)
        for piece in pieces:
            _show(piece)
        _show("\n")
    except api.CheckpointError as error:
        refuse(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _show(text: str) -> None:
    """Write at once; a character that the terminal's encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
