"""The elastic agent's process: started so that it dies with the launcher, and ended with everything below it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalaunch.launch.process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Process,
    descendants,
    find_process,
    kill_all,
    set_process_control,
)
from megalaunch.rundir.files import open_file

KILL_SECONDS = 5.0


class Agent:
    """One agent, from construction to `end`. Its output goes to `log`, its exit code comes from `poll`.

    While it lives this process adopts orphans, so that workers whose agent was killed are still found below us.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            # The kernel sends the parent-death signal when the *thread* that started the child ends.
            raise RuntimeError("the agent must be started from the launcher's main thread")
        set_process_control(PR_SET_CHILD_SUBREAPER, 1)
        self._not_ours = {process.pid for process in descendants(os.getpid())}
        launcher = os.getpid()

        def die_with_launcher() -> None:
            set_process_control(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the line above
                os._exit(1)

        with os.fdopen(open_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            self._child = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher alone
                preexec_fn=die_with_launcher,
            )
        process = find_process(self._child.pid)
        assert process is not None, "an unwaited child has an entry in /proc"
        self.process: Process = process

    def poll(self) -> int | None:
        """Its exit code (negative: by that signal), or None while it runs."""
        return self._child.poll()

    def kill_tree(self) -> list[Process]:
        """Kill the agent, then all that it ever started; returns what could not be killed in KILL_SECONDS.

        The agent goes first, or it would start its workers anew.
        """
        if self._child.poll() is None:
            below = descendants(self._child.pid)
            self._child.kill()
            self._child.wait()
        else:
            below = []
        left = kill_all(below, KILL_SECONDS)
        for _ in range(3):  # what they started meanwhile; it was given to us as orphans
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
