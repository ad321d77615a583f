"""`megalaunch evaluate`: the loss of a trained model on texts, and its scores in lm-eval tasks."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.data.errors import DataError
from megalaunch.format.numbers import format_count
from megalaunch.format.table import table_lines
from megalaunch.installation import install_command
from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.engine.api import Score, TaskScore

Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|HF_DIR",
        help="A run, a checkpoint, a Hugging Face folder, or hf://ORG/NAME.",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PREFIX|TEXTS",
        help="Token files; a file, folder or glob of texts; hf://datasets/ORG/NAME; may be repeated.",
    ),
]
NoBos = Annotated[
    bool, typer.Option("--no-bos", help="Omit the special tokens (BOS) that the tokenizer adds to a text.")
]


def evaluate(
    source: Source,
    data: Data = None,
    layout: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LAYOUT]...", help="Parallel layout over local workers, e.g. parallel=tp2pp2."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A task or group of lm-eval; may be repeated.")
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of custom tasks. lm-eval runs Python code that they name: use only trusted ones.",
        ),
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Number of few-shot examples per question.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N questions of each task.")] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, help="Sequence length in tokens (default: the run's; for tasks the model's maximum)."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size: rows evaluated together.")] = 4,
    json_key: Annotated[str, typer.Option(help="The key of the text in jsonl and parquet.")] = "text",
    no_bos: NoBos = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines: one object per data set or metric.")] = False,
) -> None:
    """Evaluate a model on data sets (loss, perplexity, bits per byte) and on lm-eval tasks.

    The loss is computed as the validation loss of a run. Overrides such as `parallel=tp2` shard the model over workers
    on this machine, as in `train`.
    """
    from megalaunch.runs.hub_paths import local_data, local_model

    source, data = local_model(source), local_data(data or [])
    _check(source, data, layout, task, include_path)
    show = _Table(json)
    with _fail_on_errors():
        _warn_omitted(data or ())
        from megalaunch.engine import api

        if layout:
            from megalaunch.runs.distributed_inference import run_distributed

            run_distributed(
                source, layout, api.EvaluateJob(tuple(data or ()), sequence_length, batch_size, json_key, no_bos), show
            )
            return
        model = api.open_model(source, lambda message: typer.echo(message, err=True))
        api.set_num_threads_for(model)
        model = replace(model, add_special_tokens=model.add_special_tokens and not no_bos)
        for score in api.evaluate(model, data, sequence_length, batch_size, json_key) if data else ():
            show(score)
        if task:
            scores = api.task_scores(model, task, include_path, num_fewshot, limit, batch_size, sequence_length)
            _show_tasks(scores, json)


def _warn_omitted(data: Sequence[str]) -> None:
    """Print a note on files of a folder that are not data. Raises DataError for a folder of several splits."""
    from megalaunch.data.preprocess.corpus.documents import find_corpus

    for name in data:
        if Path(name).expanduser().is_dir():
            for text in find_corpus(name, "text", split=None).notes:
                typer.echo(f"note: {text}", err=True)


class _Table:
    """Prints scores as they arrive, after a header."""

    def __init__(self, json: bool) -> None:
        self._json, self._headed = json, json

    def __call__(self, score: Score) -> None:
        if not self._headed:
            typer.echo(f"{'tokens':>12}{'loss':>10}{'perplexity':>14}{'bits a byte':>13}  data")
        self._headed = True
        typer.echo(json_text.dumps(_record(score)) if self._json else _row(score))


@contextmanager
def _fail_on_errors() -> Iterator[None]:
    from megalaunch.engine.api import CheckpointError
    from megalaunch.runs.errors import fail, refuse

    try:
        yield
    except DataError as error:
        fail(str(error), ExitCode.DATA)
    except CheckpointError as error:
        fail(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot read a file: {error}", ExitCode.DATA)
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _check(
    source: Path, data: list[str] | None, layout: list[str] | None, task: list[str] | None, include_path: Path | None
) -> None:
    """Refuse invalid arguments before torch is imported."""
    from megalaunch.importers.huggingface.folder import gguf_refusal
    from megalaunch.runs.errors import fail

    if not data and not task:
        fail("nothing to evaluate on: add texts or token files with --data, or a task of lm-eval with --task")
    if layout and task:
        fail(f"lm-eval tasks run in one process: omit {' '.join(layout)} or --task")
    if source.suffix == ".gguf" and source.is_file():
        fail(gguf_refusal(source))
    if not source.is_dir():
        fail(f"{source} is not a directory: name a run, one of its checkpoints/step_<number> or a Hugging Face folder")
    if include_path is not None and not include_path.is_dir():
        fail(f"--include-path {include_path} is not a directory: name the folder with the YAML files of your tasks")
    if find_spec("torch") is None:
        fail(f"evaluate needs torch, which is not installed; add it with: {install_command('megalaunch[train]')}")
    if task and find_spec("lm_eval") is None:
        fail(f"--task needs lm-eval, which is not installed; add it with: {install_command('megalaunch[lm-eval]')}")


def _show_tasks(scores: Sequence[TaskScore], json: bool) -> None:
    if json:
        for score in scores:
            typer.echo(json_text.dumps(asdict(score)))
        return
    rows = [("samples", "value", "stderr", "metric", "task")]
    for score in scores:
        stderr = "-" if score.stderr is None else f"{score.stderr:.4f}"
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        rows.append((format_count(score.samples), f"{score.value:.4f}", stderr, metric, score.task))
    for line in table_lines(rows, right=(0, 1, 2)):
        typer.echo(line)


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
