"""Join a launch: a node of an allocation waits until node 0 has prepared the run in the directory that both share."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from megalaunch.launch.announcement import Announced, NotAnnounced, launch_id, read_announcement, spec_hash
from megalaunch.platform.allocation import NodePlace
from megalaunch.platform.software import Software
from megalaunch.rundir.environment import current_attempt
from megalaunch.rundir.outcome import ExitCode
from megalaunch.rundir.paths import RunDirectory

_NODE_0_ENDED = 1
"""Exit code of a node whose node 0 ended: below node 0's codes, as srun ends with the largest of all."""


class JoinError(Exception):
    """This node cannot take part in the run; the message gives the reason in one sentence."""

    def __init__(self, message: str, exit_code: int = ExitCode.CONFIGURATION) -> None:
        self.exit_code = exit_code
        super().__init__(message)


@dataclass(frozen=True)
class Limits:
    """Times in seconds.

    Attributes:
        start: until node 0 has started, while its machine is reached; nodes may start in any order.
        reach: until node 0's machine is reached.
        share: until a file of node 0 is seen here; a network file system caches the absence of a file.
        answer: for one connection.
        poll: between two looks.
    """

    start: float = 600.0
    reach: float = 8.0
    share: float = 8.0
    answer: float = 4.0
    poll: float = 0.5


def wait_for_launch(
    directory: RunDirectory, place: NodePlace, say: Callable[[str], None], limits: Limits | None = None
) -> None:
    """Wait until node 0 has written spec.yaml and this node sees it; raises JoinError.

    Args:
        say: prints a line of progress.
    """
    limits = limits or Limits()
    announced = _first_answer(place, say, limits)
    while not _sees_launch(directory, announced.launch_id, limits):
        if _still_announced(place, announced.launch_id, limits):
            raise _not_shared(directory, place)
        announced = _first_answer(place, say, limits)  # that launch has ended, and its node 0 starts again
    _require_same_software(announced, place)
    while announced.spec is None:
        time.sleep(limits.poll)
        announced = _next_answer(place, announced.launch_id, limits)
    if not _is_seen(directory, limits, lambda: spec_hash(directory) == announced.spec):
        raise _not_shared(directory, place)


def _require_same_software(announced: Announced, place: NodePlace) -> None:
    """Raise JoinError if this node runs other code, another Python or another torch than node 0."""
    differences = Software.of_this_node().differences(announced.software) if announced.software else []
    if differences:
        node = f"node {place.rank} ({socket.gethostname()})"
        shown = "; ".join(f"{name} is {mine} here, {theirs} on node 0" for name, mine, theirs in differences)
        raise JoinError(f"{node} has other software: {shown}; install the same on all nodes")


def _first_answer(place: NodePlace, say: Callable[[str], None], limits: Limits) -> Announced:
    """Return the first announcement; waits for a node 0 that has not started yet."""
    began, said = time.monotonic(), False
    while True:
        try:
            return read_announcement(place, limits.answer)
        except NotAnnounced:
            raise JoinError(
                f"the process on {place} is not node 0 of this run: another program uses the port; set another "
                "MASTER_PORT on every node"
            ) from None
        except OSError as error:
            reason, waited = _reason(error), time.monotonic() - began
            was_reached = current_attempt(os.environ) > 0  # so that a restart may cure it
            may_start = isinstance(error, ConnectionRefusedError) or place.appears_late
            if waited > (limits.start if may_start else limits.reach):
                raise JoinError(
                    f"node {place.rank} does not reach node 0 on {place} ({reason}): check that node 0 has started, "
                    "or set MASTER_ADDR on every node to an address of node 0",
                    ExitCode.CRASH if may_start or was_reached else ExitCode.CONFIGURATION,
                ) from None
            if not said:
                say(f"node {place.rank} waits for node 0 on {place} ({reason})")
                said = True
        time.sleep(limits.poll)


def _next_answer(place: NodePlace, launch: str, limits: Limits) -> Announced:
    """Return the announcement of a launch that has begun; raises JoinError if node 0 has ended."""
    try:
        announced = read_announcement(place, limits.answer)
    except TimeoutError:  # a machine under load; its launch has not ended
        return Announced(launch, None)
    except (OSError, NotAnnounced):
        announced = None
    if announced is None or announced.launch_id != launch:
        raise JoinError(
            f"node 0 ({place.first_node}) ended before the workers started: its output has the reason", _NODE_0_ENDED
        )
    return announced


def _sees_launch(directory: RunDirectory, launch: str, limits: Limits) -> bool:
    return _is_seen(directory, limits, lambda: launch_id(directory) == launch)


def _still_announced(place: NodePlace, launch: str, limits: Limits) -> bool:
    try:
        return read_announcement(place, limits.answer / 2).launch_id == launch
    except TimeoutError:  # a machine under load
        return True
    except (OSError, NotAnnounced):
        return False


def _is_seen(directory: RunDirectory, limits: Limits, condition: Callable[[], bool]) -> bool:
    """Wait until a file of node 0 is seen on this node; return whether it is."""
    deadline = time.monotonic() + limits.share
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(limits.poll)
        if directory.root.is_dir():
            list(directory.root.iterdir())  # NFS looks again for files that it has reported as absent
    return True


def _not_shared(directory: RunDirectory, place: NodePlace) -> JoinError:
    return JoinError(
        f"{directory.root} on node {place.rank} ({socket.gethostname()}) is not node 0's: all nodes must share "
        "the run directory; set run.directory to a path on a shared file system"
    )


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error)
