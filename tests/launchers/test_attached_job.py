"""A job that this process holds ends, whatever fails in the thread that watches it."""

from __future__ import annotations

from pathlib import Path

from launching import wait_until

from megalaunch.launchers.attached.job import AttachedJob, NodeStarter
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.launcher import Job
from megalaunch.schema.launcher import LauncherSpec


class IdleNode(HeldNode):
    """A node whose command runs until the lease on it ends."""

    ended = False

    def poll(self) -> None:
        """Hear nothing."""

    def end_lease(self) -> None:
        self.ended = True

    def wait(self) -> bool:
        return True

    def failure(self) -> NodeError:
        return self.error("did not start")

    def _write(self, data: bytes) -> None:
        """Send nothing."""


class FaultyStarter(NodeStarter):
    """Starts a node, and fails in a way that nobody has foreseen."""

    def __init__(self) -> None:
        self.node, self.is_closed = IdleNode(0, "here"), False

    def start(self, attempt, given_up) -> list[HeldNode]:
        return [self.node]

    def returned(self) -> str:
        raise KeyError("nodes")

    def close(self) -> None:
        self.is_closed = True


def test_an_unforeseen_error_ends_the_job_with_its_nodes(tmp_path: Path):
    starter = FaultyStarter()
    job = AttachedJob(Job("run", 1, 0, (), tmp_path, tmp_path, LauncherSpec()), starter)
    wait_until(lambda: job.status.phase == "ended", seconds=5)
    assert (job.status.state, job.status.reason) == ("FAILED", "KeyError: 'nodes'")
    assert starter.node.ended
    assert starter.is_closed
