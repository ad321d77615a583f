"""`megalaunch preprocess --shards`: all shards here, one of them, or only the merge of their parts."""

from __future__ import annotations

import gc
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from megalaunch.cli.data.preprocess_output import complete_text, errors_shown, note, summary
from megalaunch.data.preprocess.settings import Settings
from megalaunch.launchers.tasks import TaskSet
from megalaunch.rundir.outcome import ExitCode
from megalaunch.runs.errors import refuse
from megalaunch.runs.task_set import TaskProgress, check_task_launcher, print_task_manifest, record_end, run_tasks
from megalaunch.schema.launcher import LauncherSpec

_CONTINUES = "finished shards are kept; the same command continues"


@dataclass(frozen=True)
class Sharded:
    """Preprocessing in shards.

    Attributes:
        inputs, prefix, settings, log_interval: as for the whole.
        given: number of shards, if it was given.
        arguments: of the command, for those of the tasks.
        launcher: overrides of the launcher, among these arguments.
        overwrite: files of another run may be replaced.
    """

    inputs: list[str]
    prefix: Path
    settings: Settings
    given: int | None
    log_interval: int | None
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    overwrite: bool = False

    def run(self, shard: int | None, merge: bool, dry_run: bool = False, detach: bool = False) -> None:
        """Write one shard, or merge, or do everything; end the command on an error.

        Args:
            shard, merge: the part of the work; None and False: all of it.
            dry_run: print what would be submitted or run.
            detach: return when a scheduler has the work.
        """
        if shard is not None and merge:
            _refuse("--shard and --merge are two tasks; give one of them.")
        if shard is not None and shard >= self._count:
            _refuse(f"--shard {shard}: the shards of --shards {self._count} are 0 to {self._count - 1}.")
        if self.settings.resume:
            _refuse("--resume is not needed with --shards: the same command continues what was interrupted.")
        if (shard is not None or merge) and (self.launcher or dry_run or detach):
            _refuse("--shard and --merge are for one machine: leave out launcher=, --dry-run and --detach.")
        if self._is_complete():
            typer.echo(complete_text(self.prefix))
        elif shard is not None:
            self._write(shard)
        elif merge:
            self._merge()
        else:
            self._run_all(dry_run, detach)

    @property
    def _count(self) -> int:
        if self.given is None:
            what = "--shard, --merge, --dry-run, --detach and launcher="
            _refuse(f"{what} need the number of all shards: give --shards N too.")
        return self.given

    @property
    def _merged(self) -> str:
        return f"{self._count} shard{'s' if self._count != 1 else ''} verified and merged"

    def _is_complete(self) -> bool:
        """Return whether the files of all shards are merged; parts that are there belong to a run that may go on."""
        if self.prefix.with_name(f".{self.prefix.name}.shards").exists():
            return False
        with errors_shown(_CONTINUES, self.log_interval):
            from megalaunch.data.preprocess.existing_output import is_complete

            return is_complete(self.inputs, self.prefix, self.settings, self.overwrite)

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

    def _merge(self, directory: Path | None = None) -> None:
        """Merge the parts; write the outcome for `megalaunch status` into the directory of a job, if there is one."""

        def tell(code: int, reason: str) -> None:
            if directory is not None:
                record_end(directory, code, reason)

        with errors_shown(_CONTINUES, self.log_interval, tell):
            from megalaunch.data.preprocess.shards.write import merge_shards

            result = merge_shards(self.inputs, self.prefix, self.settings, self._count)
        typer.echo(f"{self._merged}\n{summary(result)}")
        tell(ExitCode.DONE, self._merged)

    def _run_all(self, dry_run: bool, detach: bool) -> None:
        settings = self._launcher_settings()
        check_task_launcher(settings, detach)
        with errors_shown(_CONTINUES, self.log_interval):
            from megalaunch.data.preprocess.shards.write import open_parts

            parts = open_parts(self.inputs, self.prefix, self.settings, self._count, write=not dry_run)
            missing = parts.missing()
            tasks = self._tasks(missing, settings)
            if dry_run:
                print_task_manifest(tasks, detach)
                return
            if 0 < len(missing) < self._count:
                typer.echo(f"{self._count - len(missing)} of {self._count} shards are complete already")
            progress = TaskProgress(
                complete=lambda: sum(map(parts.is_written, missing)),
                finished=lambda: not parts.folder.exists(),  # the merge removes it
                kind="shard",
            )
            failed = run_tasks(tasks, detach, progress, note)
        if failed is not None:
            command = shlex.join(["megalaunch", *tasks.arguments(failed.number)])
            code = failed.exit_code
            text = f"shard {failed.number} of {self._count} failed (exit code {code}); {_CONTINUES}. Alone: {command}"
            refuse(text, ExitCode(code) if code in set(ExitCode) else ExitCode.CRASH)
        self._merge(tasks.directory)

    def _launcher_settings(self) -> LauncherSpec:
        if not self.launcher:
            return LauncherSpec()
        from megalaunch.config.compose import compose_launcher
        from megalaunch.config.errors import ConfigError
        from megalaunch.plan.report import problems_text
        from megalaunch.plan.rules.launcher_forms import wrong_launcher_settings
        from megalaunch.schema.build import SpecProblem

        try:
            settings = compose_launcher(self.launcher)
            if found := list(wrong_launcher_settings(settings)):
                raise ConfigError([SpecProblem(violation.path, violation.message) for violation in found])
            return settings
        except ConfigError as error:
            refuse(problems_text(error.problems))

    def _tasks(self, numbers: list[int], settings: LauncherSpec) -> TaskSet:
        own = tuple(word for word in self.arguments if word not in (*self.launcher, "--dry-run", "--detach"))
        prefix = self.prefix.absolute()
        return TaskSet(
            name=f"preprocess-{prefix.name}",
            before=("preprocess", "--shard"),
            after=own,
            numbers=tuple(numbers),
            final=("preprocess", *own),
            directory=prefix.with_name(f"{prefix.name}_job"),
            working_directory=Path.cwd(),
            settings=settings,
        )


def _refuse(text: str) -> NoReturn:
    refuse(text, ExitCode.CONFIGURATION)
