"""`megalaunch generate`: complete prompts, or answer conversations, with a trained model."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalaunch.cli.text.prompts import PromptError, read_prompts
from megalaunch.installation import install_command
from megalaunch.rundir.outcome import ExitCode

if TYPE_CHECKING:
    from megalaunch.cli.text.output import GenerationOutput
    from megalaunch.engine.api import GenerateJob, GenerationRequest, ModelSource


def _check_top_p(value: float) -> float:
    if not 0 < value <= 1:  # min= and max= of an option are bounds that it may reach
        raise typer.BadParameter(f"must be over 0 and at most 1, not {value}")
    return value


def _check_temperature(value: float) -> float:
    if not 0 <= value < math.inf:  # min= of an option lets nan and inf through
        raise typer.BadParameter(f"must be 0 or more, not {value}")
    return value


def _check_penalty(value: float) -> float:
    if not value > 0:
        raise typer.BadParameter(f"must be over 0, not {value}")
    return value


Source = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|CHECKPOINT|HF_DIR", help="A run, a checkpoint, a Hugging Face folder, or hf://ORG/NAME."
    ),
]
Layout = Annotated[
    list[str] | None,
    typer.Argument(metavar="[LAYOUT]...", help="Parallel layout over local workers, e.g. parallel=tp2pp2."),
]
Prompts = Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")]
File = Annotated[
    str | None,
    typer.Option(metavar="FILE|-", help="One prompt per line of a text file, a .jsonl file or (-) standard input."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompts.")]
System = Annotated[str | None, typer.Option(help="With --chat: the system message.")]
NewTokens = Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")]
Samples = Annotated[int, typer.Option(min=1, help="Completions per prompt.")]
Temperature = Annotated[
    float, typer.Option(callback=_check_temperature, help="Sampling temperature; 0: greedy, 1: unscaled.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Top-k sampling: the k most probable tokens.")]
TopP = Annotated[
    float,
    typer.Option(
        callback=_check_top_p,
        help="Top-p (nucleus) sampling: the most probable tokens up to this total probability (over 0, at most 1).",
    ),
]
MinP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Min-p sampling: drop tokens below this fraction of the highest probability."),
]
Penalty = Annotated[
    float,
    typer.Option(
        callback=_check_penalty,
        help="Repetition penalty, over 0; above 1, tokens that already occur become less probable.",
    ),
]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string: end the text before it; may be repeated.")]
Logprobs = Annotated[
    int | None, typer.Option(min=0, help="With --json: log-probabilities, with the top N alternatives.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling: the same seed gives the same texts.")]
NoBos = Annotated[
    bool, typer.Option("--no-bos", help="Omit the special tokens (BOS) that the tokenizer adds to a text.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Batch size: texts generated together.")]
Eager = Annotated[
    bool, typer.Option("--eager", help="Launch the kernels of decode steps one by one, not as captured graphs.")
]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Stream tokens as they are generated (the default without --json)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines: one object per text.")]


def generate(
    source: Source,
    layout: Layout = None,
    prompt: Prompts = None,
    prompts: File = None,
    chat: Chat = False,
    system: System = None,
    max_new_tokens: NewTokens = 200,
    num_samples: Samples = 1,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    stop: Stop = None,
    logprobs: Logprobs = None,
    seed: Seed = 1234,
    batch_size: BatchSize = 8,
    no_bos: NoBos = False,
    eager: Eager = False,
    stream: Stream = None,
    json: Json = False,
) -> None:
    """Generate text with a trained model: prompts and completions go to stdout as tokens are generated.

    A completion ends at an end-of-document token, before a stop string, or after the maximum number of tokens.
    Overrides such as `parallel=tp2` shard the model over workers on this machine, as in `train`.
    """
    from megalaunch.cli.text.output import JsonlOutput, TextOutput
    from megalaunch.importers.huggingface.folder import gguf_refusal
    from megalaunch.runs.errors import fail
    from megalaunch.runs.hub_paths import local_model

    source = local_model(source)
    if source.suffix == ".gguf" and source.is_file():
        fail(gguf_refusal(source))
    if not source.is_dir():
        fail(f"{source} is not a directory: name a run, one of its checkpoints/step_<number> or a Hugging Face folder")
    if logprobs is not None and not json:
        fail("--logprobs needs --json")
    if system is not None and not chat:
        fail("--system needs --chat")
    try:
        asked = read_prompts(prompt or [], prompts, chat, system)
    except PromptError as error:
        fail(str(error))
    if find_spec("torch") is None:
        fail(f"generate needs torch, which is not installed; add it with: {install_command('megalaunch[train]')}")
    from megalaunch.engine import api

    try:
        sampling = api.Sampling(temperature, top_k, top_p, seed, min_p, repetition_penalty)
        stops = tuple(stop or ())
        request = api.GenerationRequest(max_new_tokens, sampling, stops, num_samples, batch_size, logprobs, eager)
    except ValueError as error:
        fail(str(error))
    streams = not json if stream is None else stream
    job = api.GenerateJob(tuple(asked), request, no_bos)
    _write(source, layout or [], job, (JsonlOutput if json else TextOutput)(asked, num_samples, streams))


def _write(source: Path, layout: list[str], job: GenerateJob, shown: GenerationOutput) -> None:
    from megalaunch.engine import api
    from megalaunch.runs.errors import fail, refuse

    try:
        if layout:
            from megalaunch.runs.distributed_inference import run_distributed

            run_distributed(source, layout, job, shown.add)
        else:
            opened = api.open_source(source, lambda message: typer.echo(message, err=True))
            if job.no_bos:
                opened = replace(opened, add_special_tokens=False)
            _write_in_this_process(opened, api.validate_prompts(opened, job.prompts, job.request), job.request, shown)
    except api.CheckpointError as error:
        fail(str(error), ExitCode.CHECKPOINT)
    except (NotADirectoryError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        refuse("", ExitCode.INTERRUPTED)


def _write_in_this_process(
    source: ModelSource, tokens: list[list[int]], request: GenerationRequest, shown: GenerationOutput
) -> None:
    from megalaunch.engine import api

    model = api.load_weights(source)
    api.set_num_threads_for(model)
    texts = api.generate_texts(model, tokens, request)
    note = api.length_note(model, tokens, request.max_new_tokens)
    if note:
        typer.echo(note, err=True)
    for event in texts:
        shown.add(event)
