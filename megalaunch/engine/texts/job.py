"""What workers are asked to do with a language model, and what they answer, as JSON in the run directory.

`job.json` holds the job; the first rank appends its answers to `answers.jsonl`, a line each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from megalaunch.engine.inference.ask import Ask
from megalaunch.engine.inference.sampling import Sampling
from megalaunch.engine.inference.write import Chance, Piece, Place, Written
from megalaunch.rundir.atomic_file import write_file_atomically
from megalaunch.rundir.lines import Record
from megalaunch.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from megalaunch.engine.score import Score as Score

Prompt = str | Sequence[dict[str, str]]


@dataclass(frozen=True)
class WriteJob:
    """Continue these prompts."""

    prompts: tuple[Prompt, ...]
    ask: Ask
    no_bos: bool = False


@dataclass(frozen=True)
class ScoreJob:
    """Tell the loss on these data sets; the arguments of `engine.score.scores`."""

    data: tuple[str, ...]
    sequence_length: int | None
    batch_size: int
    json_key: str
    no_bos: bool = False


Job = WriteJob | ScoreJob


@dataclass(frozen=True)
class Note:
    """What the one who asked should know besides."""

    message: str


Answer = Union[Piece, Written, "Score", Note]


def job_file(directory: RunDirectory) -> Path:
    """Where the job is."""
    return directory.root / "job.json"


def answers_file(directory: RunDirectory) -> Path:
    """Where the answers are."""
    return directory.root / "answers.jsonl"


def write_job(directory: RunDirectory, job: Job) -> None:
    """Put a job where the workers look for it. Raises OSError."""
    kind = "write" if isinstance(job, WriteJob) else "score"
    write_file_atomically(job_file(directory), json.dumps({"kind": kind, **asdict(job)}))


def read_job(directory: RunDirectory) -> Job:
    """The job of a directory. Raises OSError; KeyError, TypeError and ValueError for a file that is none."""
    data = json.loads(job_file(directory).read_text(encoding="utf-8"))
    if data.pop("kind") == "score":
        return ScoreJob(**{**data, "data": tuple(data["data"])})
    ask = data["ask"]
    values = {**ask, "sampling": Sampling(**ask["sampling"]), "stop": tuple(ask["stop"])}
    return WriteJob(tuple(data["prompts"]), Ask(**values), data["no_bos"])


def record_of(answer: Answer) -> Record:
    """An answer as a line."""
    return {"kind": type(answer).__name__, **asdict(answer)}


def answer_of(record: Record) -> Answer:
    """The answer that a line holds. Raises KeyError and TypeError for other lines."""
    values = {key: value for key, value in record.items() if key != "kind"}
    if record["kind"] == "Written":
        return _written(values)
    if record["kind"] == "Score":
        from megalaunch.engine.score import Score  # what only writes text needs no trainer

        return Score(**values)
    kinds: dict[str, type[Piece] | type[Note]] = {"Piece": Piece, "Note": Note}
    return kinds[record["kind"]](**values)


def _written(values: dict[str, Any]) -> Written:
    places = values["places"]
    if places is not None:
        places = tuple(
            Place(Chance(**place["chosen"]), tuple(Chance(**one) for one in place["best"])) for place in places
        )
    return Written(**{**values, "tokens": tuple(values["tokens"]), "places": places})
