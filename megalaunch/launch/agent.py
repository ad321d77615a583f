"""The elastic agent: its process, killed together with all its descendants, and its log with exit codes of workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.fs import open_file
from megalaunch.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Process,
    descendants,
    find_process,
    kill_all,
    set_process_control,
)

KILL_SECONDS = 5.0
# Slurm sends a job's early warning to every process of a step: the launcher stops the workers, the agent must live on.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
# torch.distributed.elastic: "failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: ...", and in the closing report
# "exitcode  : -9 (pid: 12)", of the workers whose failure it saw; engine/agent adds a like line for each worker.
_EXIT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)|exitcode\s*: (-?\d+) \(pid: (\d+)\)")


class Agent:
    """The process of one elastic agent. Its output goes to `log` (None: this process's); `poll` returns its exit code.

    While it runs, this process is a child subreaper (prctl): workers of an agent that was killed become our children,
    so `kill_tree` still finds them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            # The kernel sends the parent-death signal when the *thread* that forked the child ends.
            raise RuntimeError("the agent must be started from the launcher's main thread")
        set_process_control(PR_SET_CHILD_SUBREAPER, 1)
        self._not_ours = {process.pid for process in descendants(os.getpid())}
        launcher = os.getpid()

        def die_with_launcher() -> None:
            for number in _WARNINGS:
                signal.signal(number, signal.SIG_IGN)
            set_process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before the line above
                os._exit(1)

        with contextlib.ExitStack() as files:
            output = None
            if log is not None:
                output = files.enter_context(os.fdopen(open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab"))
            self._child = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
                preexec_fn=die_with_launcher,
            )
        process = find_process(self._child.pid)
        assert process is not None, "an unwaited child has an entry in /proc"
        self.process: Process = process

    def poll(self) -> int | None:
        """Return the exit code (negative: ended by that signal), or None while the agent runs."""
        return self._child.poll()

    def kill_tree(self) -> list[Process]:
        """Kill the agent and all its descendants; return the processes that survive KILL_SECONDS.

        The agent is killed first, because it would restart workers that die.
        """
        if self._child.poll() is None:
            below = descendants(self._child.pid)
            self._child.kill()
            self._child.wait()
        else:
            below = []
        left = kill_all(below, KILL_SECONDS)
        for _ in range(3):  # processes forked meanwhile; as orphans they became our children
            if not (orphans := self._orphans()):
                break
            left = kill_all(orphans, KILL_SECONDS)
            below += orphans
        _reap(below)
        with contextlib.suppress(OSError):
            set_process_control(PR_SET_CHILD_SUBREAPER, 0)
        return left

    def _orphans(self) -> list[Process]:
        others = self._not_ours | {process.pid for root in self._not_ours for process in descendants(root)}
        return [process for process in descendants(os.getpid()) if process.pid not in others]


def _reap(dead: list[Process]) -> None:
    for process in dead:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def exit_codes(log: Path) -> dict[int, int]:
    """Return the exit code (negative: ended by that signal) of every worker that the agent reported, by pid."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for match in _EXIT.finditer(text):
        code, pid = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        found[int(pid)] = int(code)
    return found


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines that are not blank, each cut to 160 characters, without the agent's closing report.

    The closing report repeats exit codes between two lines of equal signs. It follows the output of a worker that could
    not start, which is what a reader needs.
    """
    lines: deque[str] = deque(maxlen=count)
    in_report = False
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            for line in map(str.rstrip, file):
                border = len(line) > 20 and set(line) == {"="}
                if line and not border and not in_report:
                    lines.append(line[:160])
                in_report ^= border
    except OSError:
        return []
    return list(lines)
