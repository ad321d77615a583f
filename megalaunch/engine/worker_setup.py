"""Set up a worker process before torch is imported: parent-death signal, log file, stop signals, malloc.

Standard library only: importing torch takes a second, in which the launcher may be killed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megalaunch.fs import make_directory, open_file
from megalaunch.rundir.environment import LAUNCHER_PID_VARIABLE
from megalaunch.rundir.redact import redact_output

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT, _KEPT_BEFORE_2_35 = 2**30, 2**25  # bytes; the largest M_MMAP_THRESHOLD of older glibc, which refuses more
_RESERVED, _HUGE_PAGE = _KEPT - 2**24, 2**21  # bytes; below the mmap threshold
_MADV_HUGEPAGE = 14  # sys/mman.h
REPEAT_SECONDS = 1.0


def die_with_parent() -> None:
    """Have the kernel kill this process when the agent dies; exit at once if agent or launcher are already gone.

    The signal is Linux only; elsewhere a dead agent is detected by the process group's timeout.
    """
    parent = os.getppid()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    if os.getppid() != parent or (launcher is not None and not _alive(int(launcher))):
        os._exit(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without the garbage collector, and leave what was imported out of later collections.

    Otherwise it scans the objects of torch again and again: a third of the processor time of a worker's imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tune_malloc() -> None:
    """Make malloc reuse the memory of freed large tensors: memory from the kernel is zeroed page by page again.

    glibc only; a no-op elsewhere. Allocations above _KEPT bytes are still mapped by the kernel and returned to it.
    """
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, _KEPT)
    if mallopt(_M_MMAP_THRESHOLD, _KEPT):
        _reserve_huge_pages(libc)
    else:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BEFORE_2_35)


def _reserve_huge_pages(libc: ctypes.CDLL) -> None:
    """Grow malloc's heap by _RESERVED bytes and request 2 MiB pages for it; untouched pages take no memory.

    torch's own switch for huge pages requests them per tensor, at addresses that malloc may map anew every time.
    """
    if not sys.platform.startswith("linux"):
        return
    libc.malloc.restype = ctypes.c_void_p
    first = libc.malloc(ctypes.c_size_t(_RESERVED))
    if first is None:  # a limit on address space
        return
    start = first + -first % _HUGE_PAGE
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(_RESERVED - _HUGE_PAGE), _MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(first))


def redirect_output(log: Path) -> None:
    """Redirect stdout and stderr of this process, native libraries included, to a log file, appending.

    The secrets of the environment are replaced in what Python writes.
    """
    make_directory(log.parent)
    descriptor = open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    redact_output()


class StopSignal:
    """Handler of SIGTERM and SIGINT: stores the first, for the training loop to stop between steps; a second one exits.

    The same signal within REPEAT_SECONDS counts as the same request: if a scheduler signals all processes of a job, a
    worker gets it directly and again from its agent.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._started, self._received_at = time.monotonic(), 0.0

    def install(self) -> None:
        """Install the handler for both signals; must run in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def request(self, time_limit: float | None) -> signal.Signals | None:
        """Return the signal received, or SIGALRM if the process began more than `time_limit` minutes ago."""
        is_over = time_limit is not None and time.monotonic() - self._started >= time_limit * 60
        return self.signal or (signal.SIGALRM if is_over else None)

    def _received(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = signal.Signals(number), now
        elif self.signal != number or now - self._received_at > REPEAT_SECONDS:
            os._exit(128 + number)
