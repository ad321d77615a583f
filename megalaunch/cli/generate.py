"""`megalaunch generate`: a trained model continues texts, or answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.prompts import Prompt, PromptError, read_prompts
from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.engine.api import Ask, LanguageModel


def generate(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_DIR|CHECKPOINT|HF_DIR", help="A run, a checkpoint, or a Hugging Face folder.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; may be given again.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="A prompt a line, of a text file, a .jsonl file or (-) standard input."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's own chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    num_samples: Annotated[int, typer.Option(min=1, help="Texts of each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token; 1: as learnt.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens that hold this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Leave out tokens less likely than this part of the likeliest one.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.0, help="Over 1: tokens that the text holds already become less likely.")
    ] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End a text before this string; may be given again.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: log-probabilities, with those of the N likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same texts.")] = 1234,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that are written at once.")] = 8,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Show text as it is written (default, but with --json).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a text, a line each.")] = False,
) -> None:
    """Let a trained model continue texts: the prompts and what follows go to standard output as they are written.

    Each text ends with the document that the model writes, before a stop string, or after the given number of tokens.
    """
    from megalaunch.cli.exit import refuse

    source = source.expanduser()
    if not source.is_dir():
        refuse(f"{source} is no directory; give a run, one of its checkpoints/step_<number> or a Hugging Face folder")
    if logprobs is not None and not json:
        refuse("--logprobs goes with --json: plain text has no place for them")
    if system is not None and not chat:
        refuse("--system goes with --chat")
    try:
        asked = read_prompts(prompt or [], prompts, chat, system)
    except PromptError as error:
        refuse(str(error))
    if find_spec("torch") is None:
        refuse("generate needs torch, which is not installed; add it with: pip install 'megalaunch[train]'")
    from megalaunch.engine import api

    try:
        sampling = api.Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        ask = api.Ask(max_new_tokens, sampling, tuple(stop or ()), num_samples, batch_size, logprobs)
        model = api.open_model(source, report=lambda message: typer.echo(message, err=True))
        _write(model, asked, ask, json, not json if stream is None else stream)
    except api.CheckpointError as error:
        refuse(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        refuse(str(error))
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _write(model: LanguageModel, prompts: list[Prompt], ask: Ask, as_json: bool, stream: bool) -> None:
    from megalaunch.cli.texts_shown import shown_json, shown_text
    from megalaunch.engine import api

    api.fit_threads(model)
    tokens = api.tokens_of(model, prompts)
    texts = api.answers(model, tokens, ask)
    note = api.length_note(model, tokens, ask.max_new_tokens)
    if note:
        typer.echo(note, err=True)
    show = shown_json if as_json else shown_text
    show(texts, prompts, ask.num_samples, stream)
