"""What a pod of a detached set runs: its task, and after the last task of all the final command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from megalaunch.launchers.kubernetes.pod_task import INDEX, NUMBER, task_arguments
from megalaunch.launchers.tasks import TaskSet

MODULE = "megalaunch.launchers.kubernetes.detached_pod"


def detached_words(tasks: TaskSet, places: Path) -> tuple[str, ...]:
    """Return the arguments of this module: the folder of places, the final command, and the tasks' numbers and command.

    Args:
        places: a folder of this submission alone, in which each pod that has completed its task takes a place.
    """
    numbers = ",".join(map(str, tasks.numbers))
    return (str(places), str(len(tasks.final)), *tasks.final, numbers, *tasks.arguments(NUMBER))


def main(words: Sequence[str]) -> None:
    """Run the task of this pod; become the final command in the last pod, or where no task is left."""
    places, length, *rest = words
    final, (numbers, *arguments) = rest[: int(length)], rest[int(length) :]
    index = int(os.environ.pop(INDEX))  # left there, it would be the rank of a node among those of one run
    if numbers:
        code = _run(task_arguments(numbers, index, arguments))
        if code:
            raise SystemExit(128 - code if code < 0 else code)
        if not takes_last_place(Path(places), index, len(numbers.split(","))):
            return
    os.execv(sys.executable, _command(final))


def takes_last_place(folder: Path, index: int, count: int) -> bool:
    """Take the first free place of a folder, and return whether it is the last of `count`.

    A pod that is started again finds the place that it has. A place is a symbolic link: one operation makes it with its
    content or finds that it exists, also on NFS, where a listing may be older than what other machines have written.
    """
    for place in range(count - 1):
        path = folder / str(place)
        try:
            path.symlink_to(str(index))
        except FileExistsError:
            if str(path.readlink()) != str(index):
                continue
        return False
    return True


def _run(arguments: Sequence[str]) -> int:
    """Run a command of megalaunch, and pass SIGTERM on to it; return its exit code, negative for a signal."""
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)  # without a handler, the first process of a container does not get it
    process = subprocess.Popen(_command(arguments))
    if stopped:
        process.terminate()
    code = process.wait()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return code


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "megalaunch", *arguments]


if __name__ == "__main__":
    main(sys.argv[1:])
