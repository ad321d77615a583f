"""What commands and library users call; everything else of the engine may move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalaunch.config.schema import RunSpec
from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface, import_megatron
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.inference.batch_generation import Completion, TextDelta
from megalaunch.engine.inference.jobs import (
    Answer,
    EvaluateJob,
    GenerateJob,
    Job,
    Warning,
    answers_file,
    from_record,
    write_job,
)
from megalaunch.engine.inference.load_model import LanguageModel, ModelSource, load_weights, open_model, open_source
from megalaunch.engine.inference.request import (
    GenerationRequest,
    generate_texts,
    length_note,
    tokenize_prompts,
    validate_prompts,
)
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.simulate.report import CollectiveReport, DeepPlan

if TYPE_CHECKING:
    from megalaunch.engine.lm_eval_adapter import TaskScore as TaskScore
    from megalaunch.engine.perplexity import Score as Score

__all__ = [
    "Answer",
    "CheckpointError",
    "CollectiveReport",
    "Completion",
    "DeepPlan",
    "EvaluateJob",
    "GenerateJob",
    "GenerationRequest",
    "Job",
    "LanguageModel",
    "MegatronCheckpoint",
    "ModelSource",
    "Sampling",
    "TextDelta",
    "Warning",
    "answers_file",
    "deep_plan",
    "dtype_from_name",
    "evaluate",
    "export_huggingface",
    "from_record",
    "generate",
    "generate_texts",
    "import_huggingface",
    "import_megatron",
    "length_note",
    "load_weights",
    "open_model",
    "open_source",
    "set_num_threads_for",
    "stream_text",
    "task_scores",
    "tokenize_prompts",
    "validate_prompts",
    "write_job",
]

_WORTH_THREADS = 20_000_000  # parameters; one thread reads as many in about 10 ms


def deep_plan(spec: RunSpec, rank: int | None = None) -> DeepPlan:
    """What one step of `rank` (None: the first of the fullest stage) holds and sends, of a resolved spec.

    Raises ValueError for a rank outside the world and for what the engine does not run, RuntimeError inside a process
    group.
    """
    from megalaunch.engine.simulate.deep_plan import deep_plan as planned  # what only generates text needs no DTensor

    return planned(spec, rank)


def evaluate(
    model: LanguageModel,
    data: list[str],
    sequence_length: int | None = None,
    batch_size: int = 4,
    json_key: str = "text",
) -> Iterator[Score]:
    """How well a model predicts each data set; `engine.score` says how. Raises DataError and ValueError."""
    from megalaunch.engine.perplexity import evaluate_perplexity as scored  # what only generates text needs no trainer

    return scored(model, data, sequence_length, batch_size, json_key)


def task_scores(
    model: LanguageModel,
    tasks: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 4,
    max_length: int | None = None,
) -> list[TaskScore]:
    """What a model reaches in tasks of lm-eval, which must be installed; `engine.harness` says how.

    Raises ValueError for unknown tasks, OSError when the data of one is not there.
    """
    from megalaunch.engine.lm_eval_adapter import task_scores as scored  # lm-eval is an extra, and imports a lot

    return scored(model, tasks, include_path, num_fewshot, limit, batch_size, max_length)


def dtype_from_name(word: str) -> torch.dtype:
    """`fp32`, `bf16` or `fp16`; raises KeyError for other words."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[word]


def generate(source: Path, prompt: str, max_new_tokens: int = 200, sampling: Sampling | None = None) -> str:
    """What the model of a run or checkpoint directory writes after `prompt` (the prompt is not repeated).

    Raises as `open_model` and `stream_text` do.
    """
    return "".join(stream_text(open_model(source), prompt, max_new_tokens, sampling))


def stream_text(
    model: LanguageModel, prompt: str, max_new_tokens: int = 200, sampling: Sampling | None = None
) -> Iterator[str]:
    """Yield the text after `prompt` piece by piece, until the document ends or `max_new_tokens` are written.

    Raises ValueError at once, not at the first piece, when the prompt is empty or too long for the model.
    """
    asked = generate_texts(
        model, tokenize_prompts(model, [prompt]), GenerationRequest(max_new_tokens, sampling or Sampling())
    )
    return (piece.text for piece in asked if isinstance(piece, TextDelta))


def set_num_threads_for(model: LanguageModel) -> None:
    """For a process that does nothing but write text: one thread for a small model on a CPU.

    Threads that share out a few microseconds of work mostly wait for each other; measured for 6 M parameters on
    2 busy cores: 0.4 s for 100 tokens on one thread, over 10 s on two.
    """
    if sum(parameter.numel() for parameter in model.decoder.parameters()) < _WORTH_THREADS:
        torch.set_num_threads(1)
