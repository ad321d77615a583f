"""Continue a command in the background, so that what ends with its process outlives the terminal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from megalaunch.fs import make_directory, open_file

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_READY = b"1"


class Background:
    """The process that continues. Until `leave_terminal`, it prints to the terminal, and Ctrl-C ends it."""

    def __init__(self, ready: int) -> None:
        self._ready = ready

    def leave_terminal(self, log: Path) -> None:
        """Let the command that was typed end with exit code 0; continue in a session of its own, with output in `log`.

        Raises OSError if the log cannot be written.
        """
        make_directory(log.parent)
        output = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        sys.stdout.flush()
        sys.stderr.flush()
        os.setsid()
        for source, place in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, place)
        os.close(output)
        os.close(nothing)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.write(self._ready, _READY)
        os.close(self._ready)


def continue_in_background() -> Background:
    """Fork, and return in the child alone.

    This process ends when the child leaves the terminal, or with the child's exit code. It must not have threads,
    connections or locks yet.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    # A signal that comes before the handlers below is delivered after them: it would end this process alone.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_FORWARDED))
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(read)
        return Background(write)
    os.close(write)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the child too

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if os.read(read, 1) == _READY:
        os._exit(0)  # nothing of this process is cleaned up: the child continues with it
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(128 - code if code < 0 else code)
