"""The body of a task of Ray: one command of megalaunch, which ends with the worker of Ray that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megalaunch.process import PR_SET_PDEATHSIG, set_process_control


def run_command(python: str | None, arguments: Sequence[str], working_directory: str, log: str) -> int:
    """Run a command, with its output appended to `log`; return its exit code, negative for a signal.

    Raises:
        FileNotFoundError: this node does not share the working directory, or the folder of the log.
    """
    for folder in (Path(working_directory), Path(log).parent):
        if not folder.is_dir():
            raise FileNotFoundError(f"this node of Ray does not share {folder}")
    with open(log, "ab") as output:
        return subprocess.run(
            [python or sys.executable, "-m", "megalaunch", *arguments],
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(set_process_control, PR_SET_PDEATHSIG, signal.SIGTERM),
            check=False,
        ).returncode
