"""The public API of the engine, for commands and library users; the other modules are internal and may change."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megalaunch.engine.checkpoint.convert import export_huggingface, import_huggingface, import_megatron, upcycle
from megalaunch.engine.checkpoint.errors import CheckpointError
from megalaunch.engine.checkpoint.megatron_checkpoint import MegatronCheckpoint
from megalaunch.engine.checkpoint.upcycle import Upcycling
from megalaunch.engine.inference.cpu_threads import set_num_threads_for
from megalaunch.engine.inference.jobs import (
    Answer,
    EvaluateJob,
    GenerateJob,
    Job,
    JobWarning,
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
from megalaunch.engine.inference.sequence_text import Completion, TextDelta
from megalaunch.engine.inference.server.settings import ServerSettings
from megalaunch.engine.platform.registry import best_device, get_platform
from megalaunch.engine.simulate.report import CollectiveReport, DeepPlan
from megalaunch.schema import RunSpec

if TYPE_CHECKING:
    from megalaunch.engine.inference.perplexity import Score as Score
    from megalaunch.engine.lm_eval_adapter import TaskScore as TaskScore
    from megalaunch.engine.model.layer_modules import LayerModules
    from megalaunch.engine.operator_check import OperatorCheck as OperatorCheck
    from megalaunch.engine.platform.device_check import DeviceCheck as DeviceCheck

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
    "JobWarning",
    "LanguageModel",
    "MegatronCheckpoint",
    "ModelSource",
    "Sampling",
    "ServerSettings",
    "TextDelta",
    "Upcycling",
    "answers_file",
    "check_platform",
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
    "serve",
    "set_num_threads_for",
    "stream_text",
    "task_scores",
    "tokenize_prompts",
    "upcycle",
    "validate_prompts",
    "write_job",
]


def deep_plan(spec: RunSpec, rank: int | None = None, modules: LayerModules | None = None) -> DeepPlan:
    """Simulate one training step of one rank on fake tensors; return its memory and its collectives.

    Args:
        spec: A resolved run spec.
        rank: The global rank; None: the first rank of the pipeline stage that uses the most memory.
        modules: The modules of a layer that replace the standard ones; None: none.

    Raises:
        ValueError: The rank is outside the world, or the engine does not support a setting.
        RuntimeError: Called inside a process group.
    """
    from megalaunch.engine.simulate.deep_plan import deep_plan as planned  # late: generation needs no DTensor

    return planned(spec, rank) if modules is None else planned(spec, rank, modules)


def check_platform(name: str | None = None) -> tuple[str, list[DeviceCheck], list[OperatorCheck]]:
    """Call what the engine asks of a device, and compare a platform's operators with plain torch in fp64.

    Returns:
        The platform's name, the results of its device, and those of its operators: values and gradients.

    Args:
        name: torch's device type; None: the platform that a run here would use.

    Raises:
        ValueError: There is no such platform, or it cannot be used here.
        PlatformError: An override, or the package of a platform, cannot be loaded.
    """
    from megalaunch.engine.operator_check import check_operators  # late: generation needs no optimizer, nor DTensor
    from megalaunch.engine.platform.device_check import check_device

    platform = get_platform(best_device().type if name is None else name)
    if (reason := platform.unusable()) is not None:
        raise ValueError(f"{platform.facts.device} cannot be checked here: {reason}")
    return platform.facts.device, list(check_device(platform)), list(check_operators(platform))


def evaluate(
    model: LanguageModel,
    data: list[str],
    sequence_length: int | None = None,
    batch_size: int = 4,
    json_key: str = "text",
) -> Iterator[Score]:
    """Yield the loss and perplexity of a model on each data set; see `engine.inference.perplexity.evaluate_perplexity`.

    Args:
        model: The model.
        data: Data sets: a prefix of token files, or a file, folder or glob of texts.
        sequence_length: Tokens of a row; None: as in the training run.
        batch_size: Rows of a forward pass.
        json_key: Key of the text in JSON lines.

    Raises:
        DataError: A data set cannot be read or has no token to predict.
        ValueError: `sequence_length` exceeds the model's maximum.
    """
    from megalaunch.engine.inference.perplexity import (
        evaluate_perplexity as scored,  # late: generation needs no trainer
    )

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
    """Run tasks of lm-eval, which must be installed, and return their scores; see `engine.lm_eval_adapter.task_scores`.

    Raises:
        ValueError: A task is unknown.
        OSError: The data of a task is missing.
    """
    from megalaunch.engine.lm_eval_adapter import task_scores as scored  # late: lm-eval is an optional extra

    return scored(model, tasks, include_path, num_fewshot, limit, batch_size, max_length)


def dtype_from_name(name: str) -> torch.dtype:
    """Return the torch dtype of `fp32`, `bf16` or `fp16`; raises KeyError for other names."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def generate(source: Path | str, prompt: str, max_new_tokens: int = 200, sampling: Sampling | None = None) -> str:
    """Return the text that a model generates after `prompt`, without the prompt.

    Args:
        source: A run or checkpoint directory.
        prompt: The prompt.
        max_new_tokens: Maximum number of generated tokens.
        sampling: Temperature, top-k etc.; None: the defaults of `Sampling`.

    Raises:
        ValueError: As `stream_text`; other errors as `open_model`.
    """
    return "".join(stream_text(open_model(Path(source)), prompt, max_new_tokens, sampling))


def stream_text(
    model: LanguageModel, prompt: str, max_new_tokens: int = 200, sampling: Sampling | None = None
) -> Iterator[str]:
    """Yield the generated text after `prompt` piece by piece, until end of document or `max_new_tokens` tokens.

    Raises:
        ValueError: The prompt is empty or too long for the model. Raised by the call, not by the first iteration.
    """
    asked = generate_texts(
        model, tokenize_prompts(model, [prompt]), GenerationRequest(max_new_tokens, sampling or Sampling())
    )
    return (piece.text for piece in asked if isinstance(piece, TextDelta))


def serve(model: LanguageModel, listener: socket.socket, settings: ServerSettings) -> None:
    """Serve a model over HTTP, with OpenAI's interface, until SIGINT or SIGTERM. Call it in the main thread.

    Args:
        model: The model.
        listener: A listening TCP socket.
        settings: Name, token and limits.

    Raises:
        CheckpointError: The files of the model's chat template cannot be read.
        ImportError: starlette or uvicorn is missing (the extra `serve`).
    """
    from megalaunch.engine.inference.server.serve import serve as run  # late: an optional extra

    run(model, listener, settings)
