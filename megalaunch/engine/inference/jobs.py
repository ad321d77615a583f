"""Jobs of inference workers and their answers, as JSON in the run directory.

`job.json` has the job; the first rank appends its answers to `answers.jsonl`, one per line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from megalaunch.engine.inference.request import GenerationRequest
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.sequence_text import Completion, TextDelta, TokenLogprob, TokenLogprobs
from megalaunch.fs import write_file_atomically
from megalaunch.rundir.jsonl import Record
from megalaunch.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from megalaunch.engine.inference.perplexity import Score as Score

Prompt = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class GenerateJob:
    """Generate continuations of prompts."""

    prompts: tuple[Prompt, ...]
    request: GenerationRequest
    no_bos: bool = False


@dataclass(frozen=True)
class EvaluateJob:
    """Evaluate the loss on data sets. The fields are arguments of `engine.inference.perplexity.evaluate_perplexity`."""

    data: tuple[str, ...]
    sequence_length: int | None
    batch_size: int
    json_key: str
    no_bos: bool = False


Job = GenerateJob | EvaluateJob


@dataclass(frozen=True)
class JobWarning:
    """A warning for the user."""

    message: str


Answer = Union[TextDelta, Completion, "Score", JobWarning]


def job_file(directory: RunDirectory) -> Path:
    """Return the path of the job file."""
    return directory.root / "job.json"


def answers_file(directory: RunDirectory) -> Path:
    """Return the path of the answers file."""
    return directory.root / "answers.jsonl"


def write_job(directory: RunDirectory, job: Job) -> None:
    """Write a job for the workers. Raises OSError."""
    kind = "write" if isinstance(job, GenerateJob) else "score"
    write_file_atomically(job_file(directory), json.dumps({"kind": kind, **asdict(job)}))


def read_job(directory: RunDirectory) -> Job:
    """Read the job of a run directory. Raises OSError, and KeyError, TypeError or ValueError for an invalid file."""
    data = json.loads(job_file(directory).read_text(encoding="utf-8"))
    if data.pop("kind") == "score":
        return EvaluateJob(**{**data, "data": tuple(data["data"])})
    request = data["request"]
    values = {**request, "sampling": Sampling(**request["sampling"]), "stop": tuple(request["stop"])}
    return GenerateJob(tuple(data["prompts"]), GenerationRequest(**values), data["no_bos"])


def to_record(answer: Answer) -> Record:
    """Convert an answer to a JSON Lines record."""
    return {"kind": type(answer).__name__, **asdict(answer)}


def from_record(record: Record) -> Answer:
    """Convert a record to the answer. Raises KeyError and TypeError if it is none."""
    values = {key: value for key, value in record.items() if key != "kind"}
    if record["kind"] == "Completion":
        return _completion(values)
    if record["kind"] == "Score":
        from megalaunch.engine.inference.perplexity import Score  # imported late: generation needs no trainer

        return Score(**values)
    kinds: dict[str, type[TextDelta] | type[JobWarning]] = {"TextDelta": TextDelta, "JobWarning": JobWarning}
    return kinds[record["kind"]](**values)


def _completion(values: dict[str, Any]) -> Completion:
    logprobs = values["logprobs"]
    if logprobs is not None:
        logprobs = tuple(
            TokenLogprobs(TokenLogprob(**token["chosen"]), tuple(TokenLogprob(**one) for one in token["top_logprobs"]))
            for token in logprobs
        )
    return Completion(**{**values, "tokens": tuple(values["tokens"]), "logprobs": logprobs})
