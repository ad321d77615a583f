"""What the pod of an independent task runs: `megalaunch`, with the number that the pod's index stands for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

NUMBER = "TASK_NUMBER"
"""The word in the arguments that the number replaces."""

MODULE = "megalaunch.launchers.kubernetes.pod_task"
INDEX = "JOB_COMPLETION_INDEX"


def task_words(numbers: Sequence[int], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of this module: the number of each index, then those of `megalaunch` with NUMBER."""
    return (",".join(map(str, numbers)), *arguments)


def task_arguments(numbers: str, index: int, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `megalaunch` for the task of a pod; `numbers` are those of all pods."""
    own = list(arguments)
    own[own.index(NUMBER)] = numbers.split(",")[index]
    return own


def main(words: Sequence[str]) -> None:
    """Become `megalaunch` with the arguments of this pod's task."""
    numbers, *arguments = words
    index = int(os.environ.pop(INDEX))  # left there, it would be the rank of a node among those of one run
    os.execv(sys.executable, [sys.executable, "-m", "megalaunch", *task_arguments(numbers, index, arguments)])


if __name__ == "__main__":
    main(sys.argv[1:])
