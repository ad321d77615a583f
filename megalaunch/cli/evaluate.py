"""`megalaunch evaluate`: how well a trained model predicts texts."""

from __future__ import annotations

import json as json_text
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.data.errors import DataError
from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.engine.api import Score


def evaluate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT|HF_DIR", help="A run, a checkpoint, or a Hugging Face folder.")
    ],
    data: Annotated[
        list[str],
        typer.Option(metavar="PREFIX|TEXTS", help="Token files, or a file, folder or glob of texts; may be repeated."),
    ],
    layout: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LAYOUT]...", help="parallel=tp2pp2 and the like: over local workers."),
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(min=1, help="Tokens a row (default: the run's).")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 4,
    json_key: Annotated[str, typer.Option(help="The key of the text in jsonl and parquet.")] = "text",
    json: Annotated[bool, typer.Option("--json", help="One JSON object a data set, a line each.")] = False,
) -> None:
    """Loss, perplexity and bits per byte of a model on each data set, as the validation loss of a run is computed.

    `parallel=` words as those of `train` lay the model over workers on this machine.
    """
    from megalaunch.cli.exit import refuse

    source = source.expanduser()
    if not source.is_dir():
        refuse(f"{source} is no directory; give a run, one of its checkpoints/step_<number> or a Hugging Face folder")
    if find_spec("torch") is None:
        refuse("evaluate needs torch, which is not installed; add it with: pip install 'megalaunch[train]'")
    from megalaunch.engine import api

    headed = json

    def show(score: Score) -> None:
        nonlocal headed
        if not headed:
            typer.echo(f"{'tokens':>12}{'loss':>10}{'perplexity':>14}{'bits a byte':>13}  data")
        headed = True
        typer.echo(json_text.dumps(_record(score)) if json else _row(score))

    try:
        if layout:
            from megalaunch.cli.laid_out import answered

            answered(source, layout, api.ScoreJob(tuple(data), sequence_length, batch_size, json_key), show)
            return
        model = api.open_model(source, lambda message: typer.echo(message, err=True))
        api.fit_threads(model)
        for score in api.scores(model, data, sequence_length, batch_size, json_key):
            show(score)
    except DataError as error:
        refuse(str(error), ExitCode.DATA)
    except api.CheckpointError as error:
        refuse(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _row(score: Score) -> str:
    bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
    return f"{score.tokens:>12,}{score.loss:>10.4f}{score.perplexity:>14,.2f}{bits:>13}  {score.data}"


def _record(score: Score) -> dict[str, object]:
    return {
        "data": score.data,
        "tokens": score.tokens,
        "bytes": score.num_bytes,
        "loss": score.loss,
        "perplexity": score.perplexity if score.perplexity < float("inf") else None,
        "bits_per_byte": score.bits_per_byte,
    }
