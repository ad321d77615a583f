"""Run independent tasks on this machine, each in a process of its own."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Literal

from megalaunch.launch.stop import StopBeforeLaunch
from megalaunch.launchers.tasks import ATTEMPTS, FailedTask, TaskSet
from megalaunch.process import PR_SET_PDEATHSIG, set_process_control

_STOP_SECONDS = 10.0


class LocalTasks:
    """Runs tasks one after another, as each uses all cores."""

    attached: Literal[True] = True

    def manifest(self, tasks: TaskSet) -> str:
        """Return the command of each task, and the final one."""
        commands = [*map(tasks.arguments, tasks.numbers), tasks.final]
        return "".join(shlex.join(["megalaunch", *arguments]) + "\n" for arguments in commands)

    def run(self, tasks: TaskSet, note: Callable[[str], None], started: Callable[[], None]) -> FailedTask | None:
        """Run the tasks up to the first that fails; one whose process is killed is run once more."""
        started()
        for number in tasks.numbers:
            for attempt in range(1, ATTEMPTS + 1):
                code = _run(tasks, number)
                if code >= 0:
                    break
                again = ", it is run again" if attempt < ATTEMPTS else ""
                note(f"the process of task {number} was killed by {signal.Signals(-code).name}{again}")
            if code:
                return FailedTask(number, code)
        return None


def _run(tasks: TaskSet, number: int) -> int:
    """Run a task to its end, or stop it after a stop signal; return its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megalaunch", *tasks.arguments(number)],
        cwd=tasks.working_directory,
        start_new_session=True,  # so that Ctrl-C reaches it once, from here
        preexec_fn=partial(set_process_control, PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        return process.wait()
    except StopBeforeLaunch:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        raise
    finally:
        process.kill()
