"""Runs by ssh: an agent on each host of launcher.ssh.hosts."""

from __future__ import annotations

import os
from collections.abc import Callable

from megalaunch.launchers.attached.job import Start, start_nodes
from megalaunch.launchers.attached.launcher import AttachedLauncher
from megalaunch.launchers.attached.node import HeldNode
from megalaunch.launchers.attached.orders import copied_variables
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.ssh.commands import shown_plan, ssh_commands, ssh_orders
from megalaunch.launchers.ssh.connection import Connection
from megalaunch.rundir.paths import RunDirectory


class SshLauncher(AttachedLauncher):
    """Starts an agent on each host by ssh; the job ends with this process."""

    name = "ssh"

    def manifest(self, job: Job) -> str:
        """Return the command line of each node, and what it gets on stdin."""
        return shown_plan(job, os.environ)

    def starter(self, job: Job, shared_text: str) -> Start:
        """Return the function that connects to the hosts."""
        settings, directory = job.settings.ssh, RunDirectory(job.directory)

        def start(attempt: int, given_up: Callable[[], bool]) -> list[HeldNode]:
            orders = ssh_orders(job, copied_variables(os.environ, settings.environment), shared_text, attempt)
            commands = enumerate(ssh_commands(job))
            connect = (
                Connection(node, settings.hosts[node], command, directory.node_log(node)) for node, command in commands
            )
            return start_nodes(connect, orders, settings.connect_timeout, given_up)

        return start
