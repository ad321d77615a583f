"""Processes by /proc: state, descendants, locks and exit code of a process, and signals to exactly that process.

A pid may be reused, so a process is identified by its pid and its start time together.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process, identified by pid and start time; `started` is in clock ticks since boot."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    state: str
    parent: int
    cpu_ticks: int
    started: int
    exit_status: int


def set_process_control(option: int, value: int) -> None:
    """Call prctl(2) with one argument; raises OSError when the kernel refuses."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def find_process(pid: int) -> Process | None:
    """Return the process that has this pid now, zombies included, or None."""
    stat = _read_stat(pid)
    return Process(pid, stat.started) if stat else None


def is_alive(process: Process) -> bool:
    """Return whether a process still runs (a zombie does not)."""
    stat = _stat(process)
    return stat is not None and stat.state not in "ZX"


def is_stopped(process: Process) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    stat = _stat(process)
    return stat is not None and stat.state in "Tt"


def is_traced(process: Process) -> bool:
    """Return whether a debugger holds a process."""
    stat = _stat(process)
    return stat is not None and stat.state == "t"


def cpu_seconds(process: Process) -> float:
    """Return the CPU time that all threads of a process have used; 0 when it is gone."""
    stat = _stat(process)
    return stat.cpu_ticks / os.sysconf("SC_CLK_TCK") if stat else 0.0


def holds_flock(process: Process, descriptor: int) -> bool:
    """Return whether a process has the flock of the file that this process has open as `descriptor`."""
    file = os.fstat(descriptor)
    try:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                lock = Path(f"/proc/{process.pid}/fdinfo/{link.name}").read_text(encoding="ascii")
                if os.path.samestat(link.stat(), file) and re.search(r"^lock:.* FLOCK ", lock, re.MULTILINE):
                    return is_alive(process)
    except OSError:  # it is gone, or belongs to another user
        pass
    return False


def expects(process: Process, number: signal.Signals) -> bool:
    """Return whether a process handles, blocks or ignores a signal, so that the signal would not kill it."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    masks = (line.split()[1] for line in text.splitlines() if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def return_code(process: Process) -> int | None:
    """Return the exit code of a zombie (negative: ended by that signal), else None."""
    stat = _stat(process)
    if stat is None or stat.state != "Z":
        return None
    return os.waitstatus_to_exitcode(stat.exit_status)


def descendants(root: int) -> list[Process]:
    """Return every process below `root`, parents before children, without zombies."""
    children: dict[int, list[Process]] = {}
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        if (stat := _read_stat(pid)) and stat.state not in "ZX":
            children.setdefault(stat.parent, []).append(Process(pid, stat.started))
    found: list[Process] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [process.pid for process in below]
    return found


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False when it is gone."""
    try:
        handle = os.pidfd_open(process.pid)  # from here on the handle cannot refer to another process
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def kill_all(processes: Iterable[Process], timeout: float) -> list[Process]:
    """Send SIGKILL to each process, wait up to `timeout` seconds, and return those that still run."""
    left = [process for process in processes if send_signal(process, signal.SIGKILL)]
    deadline = time.monotonic() + timeout
    while (left := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def wait_for_any_end(processes: Iterable[Process], timeout: float) -> None:
    """Sleep until one of the processes ends, at most `timeout` seconds."""
    poll = select.poll()
    handles = []
    for process in processes:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(process.pid)
            handles.append(handle)
            poll.register(handle, select.POLLIN)
    try:
        poll.poll(timeout * 1000)
    finally:
        for handle in handles:
            os.close(handle)


def _stat(process: Process) -> _Stat | None:
    stat = _read_stat(process.pid)
    return stat if stat and stat.started == process.started else None


def _read_stat(pid: int) -> _Stat | None:
    """Parse /proc/PID/stat, see proc_pid_stat(5); a command's name may hold blanks and brackets: split after it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        user, system, started, exit_status = (int(fields[index]) for index in (11, 12, 19, 49))
        return _Stat(fields[0], int(fields[1]), user + system, started, exit_status)
    except (OSError, ValueError, IndexError):
        return None
