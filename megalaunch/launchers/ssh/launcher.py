"""Runs by ssh: an agent on each host of launcher.ssh.hosts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megalaunch.launchers.attached.job import NodeStarter, start_nodes
from megalaunch.launchers.attached.launcher import AttachedLauncher
from megalaunch.launchers.attached.node import HeldNode, NodeError
from megalaunch.launchers.attached.orders import copied_variables
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ssh.commands import shown_plan, ssh_commands, ssh_orders
from megalaunch.launchers.ssh.connection import Connection
from megalaunch.rundir.events import record_event
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.ssh import SshSpec


class SshLauncher(AttachedLauncher):
    """Starts an agent on each host by ssh; the job ends with this process."""

    name = "ssh"

    def manifest(self, job: Job) -> str:
        """Return the command line of each node, and what it gets on stdin."""
        return shown_plan(job, os.environ)

    def starter(self, job: Job, shared_text: str) -> NodeStarter:
        """Return what connects to the hosts."""
        return _Hosts(job, job.settings.ssh, shared_text)


class _Hosts(NodeStarter):
    """The hosts of a job: one for each node, and spare ones that take the places of those that fail."""

    def __init__(self, job: Job, settings: SshSpec, shared_text: str) -> None:
        self._job, self._shared_text, self._settings = job, shared_text, settings
        self._hosts = list(settings.hosts[: job.nodes])
        self._spares = list(settings.hosts[job.nodes :])
        self._replaces_stragglers = settings.replace_stragglers
        self._directory = RunDirectory(job.directory)

    def start(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        """Connect to the hosts, to spare ones in place of those that cannot take part."""
        while True:
            try:
                return self._connect(attempt, given_up)
            except NodeError as error:
                if given_up() or not self.replace(error.nodes):
                    raise
                record_event(self._directory, "note", message=f"it could not start: {error}")

    def may_replace_stragglers(self, nodes: Sequence[int]) -> bool:
        """Return whether `launcher.ssh.replace_stragglers` is on, and spare hosts are there."""
        return self._replaces_stragglers and self._has_spares(nodes)

    def _has_spares(self, nodes: Sequence[int]) -> bool:
        return len(nodes) <= len(self._spares) and (0 not in nodes or self._settings.master_addr is None)

    def replace(self, nodes: Sequence[int]) -> bool:
        """Let spare hosts take the places of these nodes; not that of node 0 if its address is set."""
        if not self._has_spares(nodes):
            return False
        for node in nodes:
            old, self._hosts[node] = self._hosts[node], self._spares.pop(0)
            message = f"node {node} moves from {old} to the spare host {self._hosts[node]}"
            record_event(self._directory, "note", message=message)
        return True

    def _connect(self, attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
        copied = copied_variables(os.environ, self._settings.environment)
        orders = ssh_orders(self._job, self._hosts[0], copied, self._shared_text, attempt)
        commands = enumerate(ssh_commands(self._job.settings, self._hosts))
        connect = (
            Connection(node, self._hosts[node], command, self._directory.node_log(node)) for node, command in commands
        )
        return start_nodes(connect, orders, self._settings.connect_timeout, given_up)
