"""The phases of a rehearsal, in order: data, train, resume, reshard, export, generate; each proves one thing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megalaunch.data.errors import DataError
from megalaunch.launch.directory import RunDirectoryError
from megalaunch.rundir.jsonl import Record, read_lines
from megalaunch.rundir.outcome import ExitCode, Outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.rehearsal.display import PhaseLine
from megalaunch.runs.rehearsal.other_layout import other_layout
from megalaunch.runs.rehearsal.shrink import SAVED_STEP
from megalaunch.runs.rehearsal.small_data import prepare_small_data
from megalaunch.schema import RunSpec
from megalaunch.schema.paths import with_value

Train = Callable[[RunSpec, RunDirectory, PhaseLine], tuple[Outcome, list[str]]]
"""Runs a spec in a directory, showing its progress; returns the outcome, and the report of a failure."""
_PROMPT = "the "
_NEW_TOKENS = 12
_SAME = {"fp32": 1e-3, "fp16": 5e-3, "bf16": 2e-2, "fp8": 5e-2}
"""Relative difference of losses and gradient norms that another order of sums may make in four steps."""
_DROPOUT_SAME = 0.3  # of gradient norms, where another layout drops other activations


class PhaseFailed(Exception):
    """A phase failed: `report` has the lines for the user, `exit_code` is that of the phase."""

    def __init__(self, phase: str, report: list[str], exit_code: ExitCode) -> None:
        self.phase, self.report, self.exit_code = phase, report, exit_code
        super().__init__(f"{phase}: {report[0]}")


@dataclass(frozen=True)
class Passed:
    """A phase that passed: what it proved, and its seconds."""

    name: str
    proved: str
    seconds: float


@dataclass
class Rehearsal:
    """The phases over one shrunk spec, in the folder `root`; `passed` grows with each of them. `train` runs a spec."""

    spec: RunSpec
    root: Path
    train: Train
    passed: list[Passed] = field(default_factory=list)

    def play(self) -> None:
        """Run every phase; raises PhaseFailed, StopBeforeLaunch."""
        for name, phase in (
            ("data", self._data),
            ("train", self._train),
            ("resume", self._resume),
            ("reshard", self._reshard),
            ("export", self._export),
            ("generate", self._generate),
        ):
            line = PhaseLine(name)
            try:
                with _failures(name):
                    proved = phase(line)
            finally:
                line.close()
            line.finish(proved)
            self.passed.append(Passed(name, proved, line.seconds))

    def _data(self, line: PhaseLine) -> str:
        line.show("generating and tokenizing")
        self.spec, what = prepare_small_data(self.spec, self.root / "data")
        return what

    def _train(self, line: PhaseLine) -> str:
        metrics = self._train_in("train", self.spec, line)
        losses = [record["loss"] for record in metrics]
        grad_norm = metrics[-1]["grad_norm"]  # null: a skipped step
        norm = "" if grad_norm is None else f", gradient norm {grad_norm:.3g}"
        return f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}{norm}"

    def _resume(self, line: PhaseLine) -> str:
        self._copy_checkpoint("resume")
        again = self._train_in("resume", self.spec, line)
        self._require_same("resume", again, 0.0, 0.0)
        return f"from step {SAVED_STEP} under the same layout: the same losses and gradient norms, bit for bit"

    def _reshard(self, line: PhaseLine) -> str:
        other = other_layout(self.spec)
        self._copy_checkpoint("reshard")
        again = self._train_in("reshard", other, line)
        tolerance = _SAME[self.spec.precision.compute_dtype]
        model = self.spec.model
        dropout = max(model.hidden_dropout, model.attention_dropout, model.embedding_dropout or 0.0)
        largest = self._require_same("reshard", again, tolerance, _DROPOUT_SAME if dropout else tolerance)
        return f"from step {SAVED_STEP} as {describe_layout(other)}: losses differ by {largest:.1g} at most"

    def _export(self, line: PhaseLine) -> str:
        line.show("importing torch")
        from megalaunch.engine import api

        report = api.export_huggingface(self.root / "train", self.root / "huggingface")
        return (
            f"Hugging Face folder, {report['compared']}: largest difference {report['largest_difference']:.2g} "
            f"(tolerance {report['tolerance']:.2g})"
        )

    def _generate(self, line: PhaseLine) -> str:
        line.show("generating")
        from megalaunch.engine import api

        greedy = api.Sampling(temperature=0.0)
        texts = [api.generate(self.root / folder, _PROMPT, _NEW_TOKENS, greedy) for folder in ("train", "huggingface")]
        if texts[0] != texts[1]:
            reason = f"the checkpoint continues {_PROMPT!r} as {texts[0]!r}, its Hugging Face folder as {texts[1]!r}"
            raise PhaseFailed("generate", [reason], ExitCode.CHECKPOINT)
        return f"{_NEW_TOKENS} tokens, the same from the checkpoint and from its Hugging Face folder"

    def _train_in(self, name: str, spec: RunSpec, line: PhaseLine) -> list[Record]:
        """Train in the run directory `name`; return its steps."""
        directory = RunDirectory(self.root / name)
        try:
            outcome, report = self.train(with_value(spec, {"run.directory": str(directory.root)}), directory, line)
        except RunDirectoryError as error:
            raise PhaseFailed(name, [str(error), f"fix:  {error.fix}"], ExitCode.CONFIGURATION) from error
        if outcome.exit_code != ExitCode.DONE:
            raise PhaseFailed(name, report or [outcome.reason], ExitCode(outcome.exit_code))
        return steps_of(directory)

    def _copy_checkpoint(self, name: str) -> None:
        """Give the run directory `name` the checkpoint that the training saved on its way."""
        source = RunDirectory(self.root / "train").checkpoint(SAVED_STEP)
        target = RunDirectory(self.root / name).checkpoint(SAVED_STEP)
        shutil.copytree(source, target)

    def _require_same(self, name: str, again: list[Record], loss_tolerance: float, norm_tolerance: float) -> float:
        """Compare resumed steps with those of the run without interruption; return the largest difference of a loss."""
        steps = steps_of(RunDirectory(self.root / "train"))
        expected = [record for record in steps if record["step"] > SAVED_STEP]
        if [record["step"] for record in again] != [record["step"] for record in expected]:
            reason = f"it did not continue after step {SAVED_STEP}: its steps are {[r['step'] for r in again]}"
            raise PhaseFailed(name, [reason], ExitCode.CHECKPOINT)
        largest = 0.0
        for one, other in zip(expected, again, strict=True):
            for key, tolerance in (("loss", loss_tolerance), ("grad_norm", norm_tolerance)):
                if not _are_close(one[key], other[key], tolerance):
                    reason = f"step {one['step']} has {key} {other[key]!r} after the resume, {one[key]!r} without it"
                    raise PhaseFailed(name, [reason], ExitCode.CHECKPOINT)
            largest = max(largest, abs(one["loss"] - other["loss"]))
        return largest


def _are_close(one: float | None, other: float | None, tolerance: float) -> bool:
    """Compare two numbers of a step; null is the gradient norm of a skipped step."""
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance * abs(one)


def describe_layout(spec: RunSpec) -> str:
    """Return the axes of a layout with more than one rank: `tp4 pp4`."""
    p = spec.parallel
    axes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "dp": p.dp or 1, "ep": p.ep, "etp": p.etp or 1}
    return " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "one process"


def steps_of(directory: RunDirectory) -> list[Record]:
    """Return the records of a run's steps."""
    return [record for record in read_lines(directory.metrics) if "loss" in record]


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Turn the errors of a phase into PhaseFailed."""
    try:
        yield
    except DataError as error:
        raise PhaseFailed(name, [str(error)], ExitCode.DATA) from error
    except OSError as error:
        raise PhaseFailed(name, [str(error)], ExitCode.CONFIGURATION) from error
    except (ValueError, RuntimeError) as error:  # includes the engine's CheckpointError
        raise PhaseFailed(name, [str(error)], ExitCode.CHECKPOINT) from error
