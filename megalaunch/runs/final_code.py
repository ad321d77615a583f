"""Tell the script that started this command that its end is final: srun's exit code may be that of another task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from megalaunch.rundir.environment import FINAL_CODE_VARIABLE
from megalaunch.rundir.outcome import NOT_RESTARTED


@contextlib.contextmanager
def final_code_written(environment: Mapping[str, str]) -> Iterator[None]:
    """Write the exit code with which the block ends the command, if no restart cures it, to the file of the script."""
    try:
        yield
    except typer.Exit as end:
        path = environment.get(FINAL_CODE_VARIABLE)
        if path is not None and end.exit_code and end.exit_code in NOT_RESTARTED:
            with contextlib.suppress(OSError):  # a full disk, or no such directory on this node
                Path(path).write_text(f"{int(end.exit_code)}\n", encoding="ascii")
        raise
