"""What workers are asked to do with a language model, and what they answer, as JSON in the run directory.

`job.json` holds the job; the first rank appends its answers to `answers.jsonl`, a line each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from megalaunch.engine.inference.batch_generation import Completion, TextDelta, TokenLogprob, TokenLogprobs
from megalaunch.engine.inference.request import GenerationRequest
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.rundir.atomic_file import write_file_atomically
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from megalaunch.engine.perplexity import Score as Score

Prompt = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class GenerateJob:
    """Continue these prompts."""

    prompts: tuple[Prompt, ...]
    ask: GenerationRequest
    no_bos: bool = False


@dataclass(frozen=True)
class EvaluateJob:
    """Tell the loss on these data sets; the arguments of `engine.perplexity.evaluate_perplexity`."""

    data: tuple[str, ...]
    sequence_length: int | None
    batch_size: int
    json_key: str
    no_bos: bool = False


Job = GenerateJob | EvaluateJob


@dataclass(frozen=True)
class Warning:
    """What the one who asked should know besides."""

    message: str


Answer = Union[TextDelta, Completion, "Score", Warning]


def job_file(directory: RunDirectory) -> Path:
    """Where the job is."""
    return directory.root / "job.json"


def answers_file(directory: RunDirectory) -> Path:
    """Where the answers are."""
    return directory.root / "answers.jsonl"


def write_job(directory: RunDirectory, job: Job) -> None:
    """Put a job where the workers look for it. Raises OSError."""
    kind = "write" if isinstance(job, GenerateJob) else "score"
    write_file_atomically(job_file(directory), json.dumps({"kind": kind, **asdict(job)}))


def read_job(directory: RunDirectory) -> Job:
    """The job of a directory. Raises OSError; KeyError, TypeError and ValueError for a file that is none."""
    data = json.loads(job_file(directory).read_text(encoding="utf-8"))
    if data.pop("kind") == "score":
        return EvaluateJob(**{**data, "data": tuple(data["data"])})
    ask = data["ask"]
    values = {**ask, "sampling": Sampling(**ask["sampling"]), "stop": tuple(ask["stop"])}
    return GenerateJob(tuple(data["prompts"]), GenerationRequest(**values), data["no_bos"])


def to_record(answer: Answer) -> Record:
    """An answer as a line."""
    return {"kind": type(answer).__name__, **asdict(answer)}


def from_record(record: Record) -> Answer:
    """The answer that a line holds. Raises KeyError and TypeError for other lines."""
    values = {key: value for key, value in record.items() if key != "kind"}
    if record["kind"] == "Completion":
        return _completion(values)
    if record["kind"] == "Score":
        from megalaunch.engine.perplexity import Score  # what only writes text needs no trainer

        return Score(**values)
    kinds: dict[str, type[TextDelta] | type[Warning]] = {"TextDelta": TextDelta, "Warning": Warning}
    return kinds[record["kind"]](**values)


def _completion(values: dict[str, Any]) -> Completion:
    places = values["places"]
    if places is not None:
        places = tuple(
            TokenLogprobs(TokenLogprob(**place["chosen"]), tuple(TokenLogprob(**one) for one in place["best"]))
            for place in places
        )
    return Completion(**{**values, "tokens": tuple(values["tokens"]), "places": places})
