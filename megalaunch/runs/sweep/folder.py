"""A sweep's folder: sweep.json defines the sweep, and each trial is a run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megalaunch.config.search_space import Values
from megalaunch.fs import write_file_atomically
from megalaunch.rundir.jsonl import append_line, read_lines
from megalaunch.rundir.paths import RunDirectory

Sampler = Literal["grid", "random", "tpe"]
Metric = Literal["tokens_per_second", "validation_loss", "loss"]
LOWER_IS_BETTER: tuple[Metric, ...] = ("validation_loss", "loss")
_VERSION = 1


class SweepFolderError(Exception):
    """The folder belongs to another sweep, or to none; `fix` says what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class Definition:
    """The settings that identify a sweep: they must be equal when it is continued."""

    overrides: tuple[str, ...]
    sampler: Sampler
    seed: int
    metric: Metric


@dataclass(frozen=True)
class SweepFolder:
    """Paths below `sweeps/<name>`."""

    root: Path

    @property
    def definition(self) -> Path:
        """Overrides, sampler, seed and metric."""
        return self.root / "sweep.json"

    @property
    def started(self) -> Path:
        """One line per started trial: its number and values."""
        return self.root / "trials.jsonl"

    @property
    def lock(self) -> Path:
        """The lock of the process that runs the sweep."""
        return self.root / "lock"

    @property
    def results(self) -> Path:
        """One row per point, the best first."""
        return self.root / "results.csv"

    @property
    def plot(self) -> Path:
        """A bar chart of the ranked trials."""
        return self.root / "results.png"

    @property
    def best(self) -> Path:
        """The recipe of the best trial."""
        return self.root / "best.yaml"

    def trial(self, number: int) -> RunDirectory:
        """Return the run directory of a point; numbers count from 1."""
        return RunDirectory(self.root / f"trial_{number:04d}")


def open_folder(folder: SweepFolder, wanted: Definition) -> bool:
    """Create the folder, or open it to continue the same sweep (True); raises SweepFolderError for other content."""
    if not folder.definition.exists():
        if folder.root.exists() and any(path.name != "lock" for path in folder.root.iterdir()):
            raise SweepFolderError(f"{folder.root} exists and is not a sweep", "choose another name with --name")
        folder.root.mkdir(parents=True, exist_ok=True)
        write_file_atomically(folder.definition, json.dumps({"version": _VERSION, **asdict(wanted)}, indent=2))
        return False
    changes = _changes(_read(folder), wanted)
    if changes:
        message = f"{folder.root} holds another sweep: {'; '.join(changes)}"
        raise SweepFolderError(message, "repeat the original overrides, or choose another name with --name")
    return True


def _read(folder: SweepFolder) -> dict[str, Any]:
    try:
        data = json.loads(folder.definition.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SweepFolderError(
            f"{folder.definition} cannot be read ({error})", "choose another name with --name"
        ) from None
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        message = f"{folder.definition} is not a sweep of version {_VERSION}, which this megalaunch reads"
        raise SweepFolderError(message, "choose another name with --name")
    return data


def _changes(stored: dict[str, Any], wanted: Definition) -> list[str]:
    then, now = [str(one) for one in stored.get("overrides", [])], list(wanted.overrides)
    changes = [f"{override} is new" for override in now if override not in then]
    changes += [f"{override} is missing" for override in then if override not in now]
    if not changes and then != now:
        changes.append("the overrides are in another order")
    names = ["sampler"]
    names += ["seed"] if wanted.sampler != "grid" else []
    names += ["metric"] if wanted.sampler == "tpe" else []
    for name in names:
        if stored.get(name) != getattr(wanted, name):
            changes.append(f"--{name} was {stored.get(name)} and is {getattr(wanted, name)}")
    return changes


def record_started(folder: SweepFolder, number: int, values: Values) -> None:
    """Record the values of a trial number before its first launch."""
    if number not in started_trials(folder):
        append_line(folder.started, {"number": number, "values": dict(values)})


def started_trials(folder: SweepFolder) -> dict[int, Values]:
    """Return the values of the started trials by number."""
    return {int(record["number"]): record["values"] for record in read_lines(folder.started)}
