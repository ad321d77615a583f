"""The body of a task of Ray: one command of megalaunch, which ends with the worker of Ray that started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from megalaunch.process import PR_SET_PDEATHSIG, set_process_control

_POLL_SECONDS = 0.5
_END_SECONDS = 5.0  # after SIGTERM


def run_command(python: str | None, arguments: Sequence[str], working_directory: str, log: str, stop: str) -> int:
    """Run a command, with its output appended to `log`; return its exit code, negative for a signal.

    Once the file `stop` is there, the command is ended, or not started.

    Raises:
        FileNotFoundError: this node does not share the working directory, or the folder of the log.
    """
    for folder in (Path(working_directory), Path(log).parent):
        if not folder.is_dir():
            raise FileNotFoundError(f"this node of Ray does not share {folder}")
    if Path(stop).exists():
        return -signal.SIGTERM
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [python or sys.executable, "-m", "megalaunch", *arguments],
            cwd=working_directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(set_process_control, PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    while not Path(stop).exists():
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_SECONDS)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        return process.wait(_END_SECONDS)
    process.kill()
    return process.wait()
