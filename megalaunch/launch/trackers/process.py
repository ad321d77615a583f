"""Start the processes that feed trackers, and end them with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from megalaunch.fs import open_file
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec
from megalaunch.schema.logging import LoggingSpec

END = b"end\n"
FINISH_SECONDS = 30.0  # to send what is left after the run


@contextlib.contextmanager
def trackers(spec: RunSpec, directory: RunDirectory) -> Iterator[None]:
    """Feed the trackers of `logging` while the body runs; then give them FINISH_SECONDS to send the rest."""
    running = {name: process for name in _names(spec.logging) if (process := _start(name, directory)) is not None}
    try:
        yield
    finally:
        _finish(running, directory)


def _names(logging: LoggingSpec) -> list[str]:
    names: list[str] = list(logging.trackers)
    if logging.prometheus_textfile:
        names.append("prometheus")
    if logging.prometheus_port is not None:
        names.append("prometheus_endpoint")
    return names


def _start(name: str, directory: RunDirectory) -> subprocess.Popen[bytes] | None:
    try:
        log = open_file(directory.tracker_log(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(log, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "megalaunch.launch.trackers", name, str(directory.root)],
                stdin=subprocess.PIPE,  # its end tells the process that this one has died
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
            )
    except OSError as error:
        _note(directory, f"warning: tracker {name} could not be started: {error}")
        return None


def _finish(running: dict[str, subprocess.Popen[bytes]], directory: RunDirectory) -> None:
    for process in running.values():
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            process.stdin.write(END)
            process.stdin.flush()
    deadline = time.monotonic() + FINISH_SECONDS
    for name, process in running.items():
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            _note(directory, f"warning: tracker {name} did not finish in {FINISH_SECONDS:.0f} s: run the command again")


def _note(directory: RunDirectory, message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not stop the launcher
        record_event(directory, "note", message=message)
