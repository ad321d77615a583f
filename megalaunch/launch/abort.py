"""Locate a worker that native code aborted, from the Python stacks that faulthandler wrote to its log."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megalaunch.rundir.collective_trace import frame_location

_TAIL_BYTES = 256 * 1024
_ABORTED = b"Fatal Python error: Aborted"  # faulthandler's heading
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MAIN = f"{os.sep}engine{os.sep}worker.py"  # the file of the outermost frame of every worker's main thread


def abort_location(log: Path) -> tuple[str, bool]:
    """Return (file and line of the main thread when it aborted, True if in a collective); ("", False) without a stack.

    Args:
        log: the rank's log; its last 256 KiB are searched for faulthandler's newest dump.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            _, found, dump = file.read().rpartition(_ABORTED)
    except OSError:
        return "", False
    stacks = _THREAD.split(dump.decode(errors="replace"))[1:] if found else []
    for stack in reversed(stacks):
        lines = [(path, int(number), function) for path, number, function in _LINE.findall(stack)]
        if any(_MAIN in path for path, _, _ in lines):
            return frame_location(lines)
    return "", False
