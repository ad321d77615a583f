"""Where a worker was when native code aborted it, from the stacks that Python leaves in its log then."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megalaunch.rundir.collective_trace import frame_location

_TAIL_BYTES = 256 * 1024
_ABORTED = b"Fatal Python error: Aborted"  # faulthandler's heading
_THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_MAIN = f"{os.sep}engine{os.sep}worker.py"  # what the main thread of every worker began with


def abort_location(log: Path) -> tuple[str, bool]:
    """The line that the main thread was at, and whether in a collective there; ("", False) if the log does not say."""
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
