"""`megalaunch preprocess --shards`: all shards here, one of them, or only the merge of their parts."""

from __future__ import annotations

import gc
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from megalaunch.cli.data.preprocess_output import errors_shown, note, summary
from megalaunch.data.preprocess.settings import Settings
from megalaunch.launchers.local_tasks import run_tasks
from megalaunch.launchers.tasks import TaskSet
from megalaunch.rundir.outcome import ExitCode
from megalaunch.runs.errors import refuse

_CONTINUES = "finished shards are kept; the same command continues"


@dataclass(frozen=True)
class Sharded:
    """Preprocessing in shards.

    Attributes:
        inputs, prefix, settings, log_interval: as for the whole.
        given: number of shards, if it was given.
        arguments: of the command, for those of the tasks.
    """

    inputs: list[str]
    prefix: Path
    settings: Settings
    given: int | None
    log_interval: int | None
    arguments: tuple[str, ...]

    def run(self, shard: int | None, merge: bool) -> None:
        """Write one shard, or merge, or do everything; end the command on an error."""
        if shard is not None and merge:
            _refuse("--shard and --merge are two tasks; give one of them.")
        if shard is not None and shard >= self._count:
            _refuse(f"--shard {shard}: the shards of --shards {self._count} are 0 to {self._count - 1}.")
        if self.settings.resume:
            _refuse("--resume is not needed with --shards: the same command continues what was interrupted.")
        if shard is not None:
            self._write(shard)
        elif merge:
            self._merge()
        else:
            self._run_all()

    @property
    def _count(self) -> int:
        if self.given is None:
            _refuse("--shard and --merge need the number of all shards: give --shards N too.")
        return self.given

    def _write(self, number: int) -> None:
        name = f"shard {number} of {self._count}"
        with errors_shown(_CONTINUES, self.log_interval) as show:
            from megalaunch.data.preprocess.tokenizer_loader import TokenizerLoader

            settings = self.settings
            with TokenizerLoader.start(settings.tokenizer, settings.merges, settings.tiktoken) as loader:
                from megalaunch.data.preprocess.shards.write import write_shard

                gc.freeze()  # the garbage collector then ignores the imported modules, which saves time at exit
                task = (number, self._count)
                result = write_shard(self.inputs, self.prefix, settings, task, show, note, loader)
        typer.echo(f"{name}: {'already complete' if result is None else summary(result).splitlines()[0]}")

    def _merge(self) -> None:
        with errors_shown(_CONTINUES, self.log_interval):
            from megalaunch.data.preprocess.shards.write import merge_shards

            result = merge_shards(self.inputs, self.prefix, self.settings, self._count)
        typer.echo(f"{self._count} shards verified and merged\n{summary(result)}")

    def _run_all(self) -> None:
        with errors_shown(_CONTINUES, self.log_interval):
            from megalaunch.data.preprocess.shards.write import open_parts

            parts = open_parts(self.inputs, self.prefix, self.settings, self._count)
            missing = parts.missing()
            if 0 < len(missing) < self._count:
                typer.echo(f"{self._count - len(missing)} of {self._count} shards are complete already")
            failed = run_tasks(self._tasks(missing), note)
        if failed is not None:
            number, code = failed
            command = shlex.join(["megalaunch", *self._tasks([number]).arguments(number)])
            text = f"shard {number} of {self._count} failed (exit code {code}); {_CONTINUES}. Alone: {command}"
            refuse(text, ExitCode(code) if code in set(ExitCode) else ExitCode.CRASH)
        self._merge()

    def _tasks(self, numbers: list[int]) -> TaskSet:
        return TaskSet(("preprocess", "--shard"), self.arguments, tuple(numbers), Path.cwd())


def _refuse(text: str) -> NoReturn:
    refuse(text, ExitCode.CONFIGURATION)
