"""The elastic agent's process: started with a parent-death signal, and killed together with all its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.fs import open_file
from megalaunch.launch.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Process,
    descendants,
    find_process,
    kill_all,
    set_process_control,
)

KILL_SECONDS = 5.0


class Agent:
    """The process of one elastic agent. Its output goes to `log`; `poll` returns its exit code.

    While it runs, this process is a child subreaper (prctl): workers of an agent that was killed become our children,
    so `kill_tree` still finds them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            # The kernel sends the parent-death signal when the *thread* that forked the child ends.
            raise RuntimeError("the agent must be started from the launcher's main thread")
        set_process_control(PR_SET_CHILD_SUBREAPER, 1)
        self._not_ours = {process.pid for process in descendants(os.getpid())}
        launcher = os.getpid()

        def die_with_launcher() -> None:
            set_process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before the line above
                os._exit(1)

        with os.fdopen(open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            self._child = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
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
        return [process for process in descendants(os.getpid()) if process.pid not in self._not_ours]


def _reap(dead: list[Process]) -> None:
    for process in dead:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)
